"""Tests how a run measures the time that its ranks wait for data and for each other."""

import mmap
import time
from functools import partial
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from fa_train.callbacks import communication
from fa_train.callbacks.communication import FSDP_STEPS, CommunicationTimer, compare
from fa_train.callbacks.monitor import resident_bytes
from fa_train.callbacks.progress import waiting
from fa_train.data.batches import TimedLoader
from fa_train.models.attention import flash_attention, naive_attention
from fa_train.parallel.context.attention import ContextAttention, shared_schedule
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import register_group
from fa_train.parallel.context.traffic import Counts, traffic

CPU = torch.device("cpu")


class SlowRows(torch.utils.data.Dataset):
    def __getitem__(self, index):
        time.sleep(0.03)
        return index

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("computing", [0.0, 0.05])
def test_a_loader_measures_its_own_time_only(computing):
    loader = TimedLoader(SlowRows(), batch_size=None)
    for epoch in (1, 2):
        started, computed = time.perf_counter(), 0.0
        before = loader.waited
        for _ in loader:
            now = time.perf_counter()
            time.sleep(computing)
            computed += time.perf_counter() - now
        assert 0.09 <= loader.waited - before <= time.perf_counter() - started - computed, epoch


def test_the_time_between_the_last_gradient_and_the_end_of_a_backward_pass_is_a_span(monkeypatch):
    now = [0]
    monkeypatch.setattr(communication, "Timestamp", lambda device: now[0])
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    timer = CommunicationTimer(CPU)
    timer.begin(model, sharded=False)
    assert timer.start == 0
    for end in (10, 20):  # two micro-batches
        now[0] = end - 3
        model(torch.ones(2)).sum().backward()
        now[0] = end
        timer.end_of_backward()
    assert timer.end() == [(7, 10), (17, 20)] and timer.start is None
    model(torch.ones(2)).sum().backward()
    timer.end_of_backward()
    assert timer.end() == [(7, 10), (17, 20)], "no hook stays"


def test_each_step_of_fsdp_is_a_span(monkeypatch):
    calls, times = [], iter(range(100))
    monkeypatch.setattr(communication, "Timestamp", lambda device: next(times))
    for name in FSDP_STEPS:
        monkeypatch.setattr(FSDPParamGroup, name, lambda group, *args, name=name: calls.append((name, *args)) or name)
    before = dict(vars(FSDPParamGroup))
    timer, group = CommunicationTimer(CPU), object.__new__(FSDPParamGroup)
    timer.begin(nn.Linear(1, 1), sharded=True)
    assert [getattr(group, name)(1) for name in FSDP_STEPS] == list(FSDP_STEPS)
    assert calls == [(name, 1) for name in FSDP_STEPS]
    assert timer.end() == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert dict(vars(FSDPParamGroup)) == before


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    register_group("alone", dist.new_group([0]))
    yield "alone"
    dist.destroy_process_group()


# The forward, the recomputation and the backward exchange keys once each. Flash attention gathers keys once more in
# its backward.
@pytest.mark.parametrize(
    ("attention", "compiled", "n_exchanges"),
    [
        pytest.param(naive_attention, False, 3, id="naive"),
        pytest.param(naive_attention, True, 3, id="naive-compiled", marks=pytest.mark.slow),
        pytest.param(flash_attention, False, 4, id="flash", marks=pytest.mark.slow),
    ],
)
def test_each_wait_for_keys_or_their_gradients_is_a_span(attention, compiled, n_exchanges, group, monkeypatch):
    now, exchange_rows = [0], dist.all_to_all_single

    def begin_exchange(*args, **kwargs):
        exchange = exchange_rows(*args, **kwargs)

        def wait():
            exchange.wait()
            now[0] += 5

        now[0] += 1  # the copies take 1 s, and the measured wait must not include the copies
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(dist, "all_to_all_single", begin_exchange)
    monkeypatch.setattr(communication, "Timestamp", lambda device: now[0])
    boundaries = np.array([0, 5, 8])
    plan = traffic(deal(boundaries, 8, 1), boundaries, 0, None, may_split=attention is flash_attention)
    # with exchanges=1, flash attention exchanges keys, although the group has only one rank
    plan = plan._replace(counts=[*Counts(*plan.counts)._replace(exchanges=1)])
    schedule = shared_schedule(plan, "short")
    q, k, v = (torch.randn(8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    attend = partial(ContextAttention(attention, group), schedule=schedule)
    if compiled:
        dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)

    def step():
        checkpoint(attend, q, k, v, use_reentrant=False).sum().backward()

    dynamo.utils.counters.clear()
    step()
    timer, now[0] = CommunicationTimer(CPU), 0
    timer.begin(nn.Linear(1, 1), sharded=False)
    thread = Thread(target=step)  # autograd runs backward passes on a GPU in other threads
    thread.start()
    thread.join()
    expected = [(6 * n + 1, 6 * n + 6) for n in range(n_exchanges)]
    assert timer.end() == expected
    step()
    assert timer.end() == expected, "nothing is measured after the end"
    assert dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "the measurement compiles nothing again"


def test_the_slowest_rank_computes_or_waits_for_data_the_longest():
    ranks = [
        {"perf/compute_ms": compute, "perf/data_wait_ms": data, "perf/host_gib": 1.0}
        for compute, data in ((90, 0), (80, 40), (100, 10))
    ]
    summary = compare(ranks)
    assert (summary["perf/compute_ms"], summary["perf/compute_ms_max"]) == (90, 100)
    assert (summary["perf/data_wait_ms_max"], summary["perf/host_gib"]) == (40, 1)
    assert summary["perf/slowest_rank"] == 1 and summary["perf/slowest_over_mean"] == pytest.approx(120 * 3 / 320)


def test_the_progress_line_summarises_waiting():
    assert waiting({"perf/step_ms": 100, "perf/data_wait_ms": 0.9}) == []
    assert waiting({"perf/step_ms": 100, "perf/data_wait_ms": 12}) == ["data wait 12%"]
    ranks = {
        "perf/communication_ms": 10,
        "perf/compute_ms": 90,
        "perf/slowest_rank": 3,
        "perf/slowest_over_mean": 1.125,
    }
    assert waiting(ranks) == ["communication 10%", "slowest rank 3, 1.12x mean"]


def test_host_memory_is_what_this_process_holds(monkeypatch):
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as held:  # mmap allocates new pages; a bytearray could reuse old ones
        held[:: 2**12] = b"x" * len(held[:: 2**12])  # touches each page
        assert 48 * 2**20 < resident_bytes() - before < 128 * 2**20
    monkeypatch.setattr("fa_train.callbacks.monitor.Path", lambda path: SimpleNamespace(exists=lambda: False))
    assert resident_bytes() == 0
