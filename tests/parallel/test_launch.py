"""Tests runs with several ranks, started by `python train.py` or torchrun."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from lightning.pytorch.callbacks import Callback
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from fa_train.data.batches import MicroBatches
from fa_train.parallel.failures import STOPPING
from fa_train.parallel.launch import launch
from tests.support.processes import REPOSITORY
from tests.support.ranks import forked, needs_ports
from tests.support.runs import start_and_stop
from tests.support.training import column, own_option, tiny

pytestmark = [pytest.mark.slow, needs_ports]
TWO = ("strategy=ddp", "trainer.devices=2", "data=synthetic", "data.val_rows=2", "max_steps=4")


class Slow(Callback):
    """Slows down both ranks: in each step, rank 1 sleeps for half a second, and rank 0 gets each micro-batch 50 ms
    late.
    """

    def on_fit_start(self, trainer, pl_module) -> None:
        if trainer.global_rank == 0:
            original = MicroBatches.__getitem__

            def slowly(rows, index):
                time.sleep(0.05)
                return original(rows, index)

            setattr(MicroBatches, "__getitem__", slowly)  # noqa: B010  # mypy refuses the assignment

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        time.sleep(0.25 * trainer.global_rank)  # a step has two micro-batches


def test_train_py_and_torchrun_give_the_same_run(tmp_path):
    torchrun = ["torchrun", "--nproc-per-node=2", str(REPOSITORY / "train.py")]
    losses = []
    slow = "+callbacks.slow._target_=tests.parallel.test_launch.Slow"
    at_this_time = "hydra.run.dir=runs/${run_name}/${now:%H-%M-%S-%f}"  # all ranks must use one folder
    for name, launcher, others in (("ours", ["train.py"], [slow]), ("theirs", torchrun, [])):
        done = forked(tmp_path, *launcher, *tiny(tmp_path, *TWO, f"run_name={name}"), *others, at_this_time)
        assert done.returncode == 0, done.stderr
        [folder] = (tmp_path / "runs" / name).iterdir()
        assert {"result.json", "metrics.csv", "checkpoints", ".hydra"} <= {path.name for path in folder.iterdir()}
        losses.append(column(folder, "train/loss"))
        if name == "ours":
            assert_ranks_are_compared(folder, done.stdout)
    assert sorted(losses[0]) == [1, 2, 3, 4] and losses[0] == losses[1]


def assert_ranks_are_compared(folder, printed) -> None:
    """The logs must say that rank 1 computes longer, and that rank 0 waits for data and for rank 1.

    All times are milliseconds per step.
    """
    measured = {
        name: list(column(folder, f"perf/{name}").values())
        for name in (
            "step_ms", "step_ms_max", "data_wait_ms", "data_wait_ms_max", "communication_ms_max", "compute_ms",
            "compute_ms_max", "slowest_rank", "slowest_over_mean", "host_gib", "host_gib_max",
        )
    }  # fmt: skip
    assert all(len(values) == 4 for values in measured.values())
    # Other programs can delay rank 0 in some steps. At most one micro-batch of a step is fetched before the step
    # begins. The wait for the run's first micro-batch is not counted.
    assert min(measured["compute_ms_max"]) >= 500 and max(measured["communication_ms_max"]) >= 200
    assert min(measured["data_wait_ms_max"]) >= 50 and sum(measured["data_wait_ms_max"]) >= 350
    assert 1 in measured["slowest_rank"] and min(measured["slowest_over_mean"]) > 1
    for name in ("step_ms", "data_wait_ms", "compute_ms", "host_gib"):
        assert all(0 < mean <= most for mean, most in zip(measured[name], measured[f"{name}_max"], strict=True))
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 4 and all("slowest rank " in line and "communication " in line for line in lines)


def test_ranks_of_a_multirun_compose_the_config_of_their_job(tmp_path):
    own = own_option(tmp_path, "optimizer/mine", "defaults: [adamw, _self_]\n")
    settings = tiny(tmp_path, *TWO, "max_steps=1", own, "optimizer=mine", "seed=${hydra:job.num}")
    done = forked(tmp_path, "train.py", "-m", *settings, "model.dim=32,64", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "sweep" / job / "result.json").exists() for job in "01")


FAILURES = {  # {name: (rank, how, reason)}
    "rank-0-killed": (0, "killed", "error: rank 0 was killed by SIGKILL; the machine may have"),
    "rank-1-killed": (1, "killed", "error: rank 1 was killed by SIGKILL; the machine may have"),
    "rank-1-exits": (1, "exit", "error: rank 1 called sys.exit(0)"),
    "out-of-memory": (1, "oom", "error: rank 1 ran out of memory: seq_len=64 with attention=sdpa"),
}


@pytest.fixture(scope="module")
def failed_runs(tmp_path_factory):
    """Maps the name of each failure to the finished run, its folder, and the seconds from the failure to the run's end.

    The runs take place at the same time, because their processes mostly wait.
    """
    folders = {name: tmp_path_factory.mktemp(name) for name in FAILURES}

    def run(name):
        rank, how, _ = FAILURES[name]
        fails = ["+callbacks.fails._target_=tests.parallel.support.runs.Fails"]
        fails += [f"+callbacks.fails.rank={rank}", f"+callbacks.fails.how={how}"]
        done = forked(folders[name], "train.py", *tiny(folders[name], *TWO, "data.num_workers=1"), *fails)
        # all processes of a machine have the same monotonic clock
        return done, folders[name], time.monotonic() - float((folders[name] / "failed_at").read_text())

    with ThreadPoolExecutor(len(FAILURES)) as pool:
        return dict(zip(FAILURES, pool.map(run, FAILURES), strict=True))


@pytest.mark.parametrize("name", FAILURES)
def test_all_ranks_end_within_a_minute_and_the_reason_is_the_last_line(name, failed_runs):
    done, folder, seconds = failed_runs[name]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(FAILURES[name][2]), done.stderr
    assert not processes_in(folder)
    assert seconds < 60


def processes_in(folder) -> list[str]:
    """Lists the processes with the working directory `folder` that have not ended within 10 seconds."""
    for _ in range(100):
        living = []
        for process in os.scandir("/proc"):
            try:
                if process.name.isdigit() and os.readlink(f"{process.path}/cwd") == str(folder):
                    living.append(process.name)
            except OSError:
                continue
        if not living:
            return []
        time.sleep(0.1)
    return living


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    overrides = tiny(tmp_path, *TWO, "max_steps=4000", "data.num_workers=1", "run_name=orphaned")
    start_and_stop(tmp_path, overrides, 2, signal.SIGKILL)
    assert not processes_in(tmp_path)


def test_sigusr1_saves_and_ends_with_a_status_of_its_own(tmp_path):
    folder = start_and_stop(tmp_path, tiny(tmp_path, *TWO, "max_steps=400", "run_name=cut"), 3, signal.SIGUSR1)
    last = max(column(folder, "train/loss"))
    assert last < 400
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{last:07d}.ckpt"]
    assert json.loads((folder / "result.json").read_text())["tokens"] == last * 4 * 64


@pytest.mark.parametrize("stop", STOPPING, ids=lambda stop: stop.name)
def test_a_signal_while_ranks_start_ends_the_run(stop, tmp_path, monkeypatch):
    def start_and_signal(self) -> None:
        start(self)
        os.kill(os.getpid(), stop)

    start = SubprocessContext._start
    monkeypatch.setattr(SubprocessContext, "_start", start_and_signal)
    program = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\ntime.sleep(30)\n"
    (tmp_path / "rank.py").write_text(program)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "rank.py")])
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # makes monkeypatch restore the variable set by `launch`
    with pytest.raises(SystemExit) as end:
        launch(2, [], {})
    assert end.value.code == 128 + stop
