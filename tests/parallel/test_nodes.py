"""Tests runs on several nodes. On this machine, two torchrun agents act as two nodes."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import processes
from tests.support.processes import REPOSITORY
from tests.support.ranks import forked, needs_ports
from tests.support.runs import run
from tests.support.training import column, tiny

pytestmark = [pytest.mark.slow, needs_ports]
DATA = ("data=synthetic", "data.val_rows=4")
REASON = "  traceback : rank 1 ran out of memory: seq_len=64 with attention=sdpa"


def on_two_nodes(tmp_path, *overrides):
    """Runs train.py with one torchrun per node, as in docs/several_gpus.md. Each node has only one rank."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    agent = [
        "torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1", str(REPOSITORY / "train.py"),
    ]  # fmt: skip
    settings = tiny(tmp_path, *DATA, "trainer.num_nodes=2", "trainer.devices=1", "strategy=fsdp")
    processes.start_server()  # start one server now, because otherwise each of the two threads would start a server
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(forked, tmp_path, *agent, *settings, *overrides) for _ in range(2)]
    return [node.result() for node in nodes]


def test_two_nodes_train_as_one_process_does(tmp_path):
    _, alone = run(tmp_path, *DATA, "max_steps=2", name="alone")
    nodes = on_two_nodes(tmp_path, "max_steps=2", "run_name=nodes")
    for node in nodes:
        assert node.returncode == 0, node.stderr
    [folder] = (tmp_path / "runs" / "nodes").iterdir()
    losses = column(folder, "train/loss")
    assert sorted(losses) == [1, 2] and losses == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert column(folder, "val/loss") == pytest.approx(column(alone, "val/loss"), rel=1e-5)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_0000002.ckpt"]


@pytest.mark.skipif("SHARDING_CASES" not in os.environ, reason="takes 10 seconds: choose SHARDING_CASES=pairwise")
def test_both_nodes_end_with_the_reason_if_a_rank_of_one_fails(tmp_path):
    """The last two lines of stderr come from torchrun: the reason of the failure, and a line of equals signs."""
    fails = ["+callbacks.fails._target_=tests.parallel.support.runs.Fails", "+callbacks.fails.rank=1"]
    for node in on_two_nodes(tmp_path, "max_steps=4", *fails, "+callbacks.fails.how=oom"):
        assert node.returncode == 1
        reason, bar = node.stderr.splitlines()[-2:]
        assert reason.startswith(REASON) and set(bar) == {"="}, node.stderr
