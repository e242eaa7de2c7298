"""Tests the processes that prepare micro-batches."""

import gc
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa_train.data.batches import leave_signals_to_the_run
from fa_train.data.datamodule import synthetic_data
from fa_train.parallel.failures import STOPPING
from tests.data.support.numbered import OPTIONS


@pytest.fixture
def data():
    """A data module with one data worker."""
    module = synthetic_data(**OPTIONS | dict(vocab_size=50, document_len=10, length_sigma=0, num_workers=1))
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    yield module
    module.teardown("fit")


def private_mib():
    """Returns the size of this process's private modified memory in MiB."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("\nPrivate_Dirty:")[2].split()[0]) / 2**10


def copied_by_a_collection():
    before = private_mib()
    gc.collect()
    return private_mib() - before


class CollectsAtTheEnd:
    """A dataset of four items. Reading the last item runs a garbage collection in the worker process.

    The last item is the growth of the process's private memory in MiB.
    """

    def __getitem__(self, index):
        return copied_by_a_collection() if index == 3 else None


@pytest.mark.slow
def test_a_garbage_collection_copies_no_memory_that_workers_share(data):
    heap = [[number] for number in range(400_000)]  # about 35 MiB
    worker = iter(data._loader(CollectsAtTheEnd(), range(4)))  # starts the worker process with a fork
    try:
        assert copied_by_a_collection() < 5
        assert [*worker][3] < 5
    finally:
        data.teardown("fit")
    assert gc.get_freeze_count() == 0 and len(heap) == 400_000


class Signals:
    """A dataset. An item has the worker's PID, the signals that were blocked when worker_init_fn began, and the signals
    that the worker ignores.
    """

    blocked: set[int] | None = None

    def start(self, worker_id):
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        leave_signals_to_the_run(worker_id)

    def __getitem__(self, index):
        return os.getpid(), self.blocked, {x for x in STOPPING if signal.getsignal(x) == signal.SIG_IGN}


@pytest.mark.slow
def test_only_the_parent_process_ends_a_data_worker_with_sigterm(data):
    """SLURM sends SIGTERM to all processes of a run, and a run then still needs micro-batches until it has saved."""
    signals = Signals()
    loader = data._loader(signals, range(8))
    assert loader.worker_init_fn is leave_signals_to_the_run
    loader.worker_init_fn = signals.start
    items = iter(loader)
    worker, blocked, ignored = next(items)
    assert blocked == ignored == {*STOPPING} and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    subprocess.run(["kill", "-TERM", str(worker)], check=True)
    assert {found for found, *_ in items} == {worker}
    [process] = multiprocessing.active_children()
    process.terminate()
    process.join(10)
    assert process.exitcode == 0
