"""Tests the number of ranks that start, their failures, NCCL's settings, and the SLURM script of
docs/several_gpus.md.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fa_train import run_config, training
from fa_train.callbacks.interrupt import GracefulInterrupt
from fa_train.errors import DivergedError, OutOfMemoryError, RankFailedError
from fa_train.parallel import communication, ctrl_c, failures, launch, rank_store
from fa_train.parallel.failures import failures_reported, kind_of
from fa_train.parallel.fsdp import FullyShardedStrategy
from fa_train.parallel.ranks import DECISIONS, ranks_to_start
from tests.support.training import CONF, REPOSITORY, composed, quiet_environment, tiny

LAUNCHERS = (
    "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_JOB_NAME", "TORCHELASTIC_ERROR_FILE", DECISIONS,
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("trainer", "variables", "expected"),
    [
        pytest.param({"devices": 1}, {}, 1, id="one"),
        pytest.param({"devices": 4}, {}, 4, id="four"),
        pytest.param({"devices": [0, 2]}, {}, 2, id="chosen"),
        pytest.param({"devices": "auto", "accelerator": "cpu"}, {}, 1, id="auto-cpu"),
        pytest.param({"devices": "auto", "accelerator": "auto"}, {}, 3, id="auto"),
        pytest.param({"devices": -1, "accelerator": "gpu"}, {}, 3, id="all"),
        pytest.param({"devices": 4}, {"TORCHELASTIC_RUN_ID": "none", "SLURM_NTASKS": "4"}, 1, id="torchrun"),
        pytest.param({"devices": 4, "num_nodes": 2}, {"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, 1, id="srun"),
        pytest.param({"devices": 4}, {"SLURM_NTASKS": "1"}, 4, id="srun-of-one-task"),
        pytest.param({"devices": 4}, {"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "interactive"}, 4, id="interactive"),
    ],
)
def test_devices_and_launcher_decide_how_many_ranks_start(trainer, variables, expected, environment):
    environment.setattr(torch.cuda, "device_count", lambda: 3)
    for name, value in variables.items():
        environment.setenv(name, value)
    assert ranks_to_start(trainer) == expected


def test_several_nodes_need_a_launcher_on_each(environment):
    with pytest.raises(ValueError, match=r"trainer.num_nodes=2 must be started by torchrun or srun on each node"):
        ranks_to_start({"devices": 4, "num_nodes": 2})


def failure(tmp_path, rank: int, exitcode: int, **report) -> ProcessFailure:
    """Returns a failure as torch's launcher describes it.

    report: the fields that the rank wrote about its failure, if any.
    """
    file = tmp_path / f"{rank}.json"
    if report:
        file.write_text(json.dumps({"timestamp": 1} | report))
    return ProcessFailure(rank, 100 + rank, exitcode, str(file))


LOST = {"kind": "lost connection", "message": "RuntimeError: Connection closed by peer"}


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        pytest.param([(0, 1, LOST), (1, -9, {})], "rank 1 was killed by SIGKILL; the machine may", id="killed"),
        pytest.param([(0, -9, {}), (1, 1, LOST)], "rank 0 was killed by SIGKILL", id="rank-0-killed"),
        pytest.param([(1, -11, {}), (0, -15, {})], "rank 1 was killed by SIGSEGV$", id="crashed"),
        pytest.param([(0, 1, LOST)], "rank 0 failed: RuntimeError: Connection closed by peer", id="another-machine"),
        pytest.param(
            [(0, 1, LOST), (1, 1, {"kind": "out of memory", "message": "out of memory: seq_len=8"})],
            "rank 1 ran out of memory: seq_len=8", id="out-of-memory",
        ),
        pytest.param([(1, 1, {"kind": "mistake", "message": "a must be b"})], "^a must be b$", id="mistake"),
        pytest.param([(1, 3, {})], "rank 1 ended with exit status 3", id="exit"),
        pytest.param([(1, 1, {"kind": "disk", "message": "full"})], "^rank 1 failed: full$", id="disk"),
    ],
)  # fmt: skip
def test_the_reason_is_the_first_failure_that_is_no_consequence(failures, reason, tmp_path):
    with pytest.raises(RankFailedError, match=reason):
        launch._fail([failure(tmp_path, rank, code, **report) for rank, code, report in failures], signum=0)


@pytest.mark.parametrize(
    ("exitcode", "signum", "status"),
    [
        pytest.param(143, 0, 143, id="one-rank-got-sigterm"),
        pytest.param(138, signal.SIGUSR1, 138, id="saved"),
        pytest.param(130, 0, 130, id="one-rank-got-sigint"),
        pytest.param(-signal.SIGUSR1, signal.SIGUSR1, 138, id="before-training"),
        pytest.param(1, signal.SIGINT, 130, id="interrupted-before-training"),
    ],
)
def test_a_stopped_run_has_the_status_of_its_signal(exitcode, signum, status, tmp_path):
    with pytest.raises(SystemExit) as ended:
        launch._fail([failure(tmp_path, 0, exitcode)], signum)
    assert ended.value.code == status


def test_a_rank_reports_why_it_fails_and_ends_at_once(tmp_path, environment, capsys):
    exits = []
    environment.setattr(os, "_exit", exits.append)
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    environment.setenv("RANK", "0")
    for error in (ValueError("a must be b"), RuntimeError("two\nlines")):
        with failures_reported((ValueError,)):
            raise error
        report = json.loads((tmp_path / "error.json").read_text())
        assert abs(report["timestamp"] - time.time()) < 60
    assert report["message"] == "RuntimeError: two lines" and report["kind"] == "error" and exits == [1, 1]
    printed = capsys.readouterr().err
    assert printed.startswith("error: a must be b\nTraceback") and printed.count("Traceback") == 1


def test_a_rank_on_a_full_disk_prints_why_it_fails_in_one_line_and_ends_at_once(tmp_path, environment, capsys):
    """The full disk also prevents the rank from writing the reason to its error file."""
    exits = []
    environment.setattr(os, "_exit", exits.append)

    def half(path, text, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "error.json"
    environment.setattr("pathlib.Path.write_text", half)
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with failures_reported((ValueError,)):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert exits == [1] and not file.exists(), "the launcher could not read an unfinished file"
    assert capsys.readouterr().err == "error: a file cannot be read or written: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        pytest.param(3, 1, "called sys.exit(3)", id="number"),
        pytest.param("two\nlines", 1, r"called sys.exit('two\nlines')", id="text"),
        pytest.param(0, 0, "called sys.exit(0)", id="success"),
        pytest.param(None, None, "called sys.exit(None)", id="nothing"),
        pytest.param(143, 143, None, id="sigterm"),
    ],
)
def test_a_rank_reports_that_it_calls_sys_exit(code, status, message, tmp_path, environment, capsys):
    """A rank that calls sys.exit(0) ends with status 0, because all ranks may call sys.exit(0).

    The status 143 means that SIGTERM has ended the rank, so the rank reports nothing.
    """
    environment.setattr(os, "_exit", sys.exit)
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    with pytest.raises(SystemExit) as end, failures_reported((ValueError,)):
        sys.exit(code)
    assert end.value.code == status
    assert capsys.readouterr().err == ""
    assert (tmp_path / "0.json").exists() == (message is not None)
    if message is not None:
        report = json.loads((tmp_path / "0.json").read_text())
        assert report["message"] == message and report["kind"] == "exit"
        with pytest.raises(RankFailedError, match=re.escape(f"rank 0 {message}")):
            launch._fail([failure(tmp_path, 1, 1, **LOST), failure(tmp_path, 0, -15)], signum=0)


def launch_stand_ins(ended: Mock, environment) -> dict[int, dict[str, str]]:
    """Calls `launch` for three ranks, but starts no processes. Returns the environment variables of each rank.

    ended: a mock of the object that start_processes returns.
    """
    environment.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # makes monkeypatch restore the variable set by `launch`
    started = Mock(return_value=ended)
    environment.setattr(launch, "start_processes", started)
    launch.launch(3, [], decisions={})
    environments: dict[int, dict[str, str]] = started.call_args.args[3]
    return environments


@pytest.mark.parametrize("status", [0, -15], ids=["ended", "killed"])
def test_a_rank_that_calls_sys_exit_explains_the_failures_of_others(status, tmp_path, environment):
    """Rank 1 calls sys.exit(0). Rank 1 ends with status 0, or the launcher kills rank 1 before it ends."""
    reports = [LOST, {"kind": "exit", "message": "called sys.exit(0)"}]
    lost, left = (failure(tmp_path, rank, 1, **report) for rank, report in enumerate(reports))
    failed = {0: lost} | ({} if status == 0 else {1: left})
    ended = Mock(error_files={rank: str(tmp_path / f"{rank}.json") for rank in range(3)})
    ended.wait.return_value = RunProcsResult(failures=failed)
    ended.pids.return_value = dict.fromkeys(range(3), 100)
    with pytest.raises(RankFailedError, match=r"^rank 1 called sys.exit\(0\)$"):
        launch_stand_ins(ended, environment)


@pytest.mark.parametrize("show", [False, True])
def test_ranks_show_tracebacks_only_if_the_user_wants_them(show, environment):
    """train.py sets HYDRA_FULL_ERROR=1 in its own process, whatever the user wants."""
    environment.setenv("HYDRA_FULL_ERROR", "1")
    environment.setattr(launch, "SHOW_TRACEBACK", show)
    given = launch_stand_ins(Mock(wait=Mock(return_value=RunProcsResult())), environment)
    assert [given[rank]["HYDRA_FULL_ERROR"] for rank in range(3)] == ["1" if show else "0"] * 3


def test_only_rank_0_says_that_ctrl_c_came_before_training(environment, capsys):
    exits = []
    environment.setattr(os, "_exit", exits.append)
    environment.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in "01":
        environment.setenv("RANK", rank)
        with failures_reported((ValueError,)):
            raise KeyboardInterrupt
    assert exits == [130, 130] and capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_at_the_start_cannot_be_swallowed(environment, capfd):
    exits = []
    environment.setattr(os, "_exit", exits.append)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ctrl_c.ctrl_c_ends_at_once()
        signal.raise_signal(signal.SIGINT)
        assert exits == [130] and capfd.readouterr().err == "interrupted\n"
        ctrl_c.ctrl_c_raises()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctrl_c.ctrl_c_ends_at_once()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_the_reason_is_one_line_even_if_tracebacks_are_shown(environment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(failures, "SHOW_TRACEBACK", True)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failures.end_rank(OutOfMemoryError("out of memory: seq_len=64"))
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"] == "out of memory: seq_len=64" and report["kind"] == "out of memory"
    assert "OutOfMemoryError: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "world_size", "ends"),
    [
        (torch.distributed.DistNetworkError("closed"), 2, True),
        (torch.distributed.DistNetworkError("closed"), 1, False),
        (RuntimeError("shape"), 2, False),
    ],
)
def test_a_lost_connection_ends_the_rank_before_lightning_waits_for_the_gpu(error, world_size, ends, monkeypatch):
    done = []
    monkeypatch.setattr(os, "_exit", done.append)
    given = {"loggers": [SimpleNamespace(finalize=done.append)], "checkpoint_callback": None}
    GracefulInterrupt().on_exception(SimpleNamespace(world_size=world_size, **given), None, error)
    assert done == (["failed", 1] if ends else [])


@pytest.fixture
def store(environment):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment.setattr(rank_store, "_store", lambda: store)
    environment.setattr(rank_store, "_ASKED", {"folder": 1})
    environment.setenv("TORCHELASTIC_RUN_ID", "1")
    environment.setenv("WORLD_SIZE", "4")
    environment.setattr(rank_store, "CONSEQUENCE", timedelta(seconds=0.1))
    environment.setattr(os, "_exit", lambda status: None)
    return store


def test_a_rank_that_loses_its_connection_reports_the_first_reason_of_others(store, environment, tmp_path):
    environment.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    lost = DistNetworkError("closed")
    reports = []
    for rank, error in (
        (1, lost),
        (2, OutOfMemoryError("out of memory: seq_len=64")),
        (3, RuntimeError("x")),
        (1, lost),
    ):
        environment.setenv("RANK", str(rank))
        failures.end_rank(error)
        reports.append(json.loads((tmp_path / "error.json").read_text()))
    assert [report["message"] for report in reports] == [
        "DistNetworkError: closed", "rank 2 ran out of memory: seq_len=64", "rank 3 failed: RuntimeError: x",
        "rank 2 ran out of memory: seq_len=64",
    ]  # fmt: skip
    assert [report["kind"] for report in reports] == ["lost connection", "out of memory", "error", "lost connection"]


def test_a_rank_reports_its_own_error_if_the_store_is_gone(store, environment):
    environment.setattr(rank_store, "_store", Mock(side_effect=DistNetworkError("refused")))
    rank_store.tell_reason("rank 0 failed")
    assert rank_store.told_reason() is None


def test_a_rank_that_never_reached_the_store_does_not_try_again(store, environment):
    environment.setattr(rank_store, "_ASKED", {})
    environment.setattr(rank_store, "_store", Mock(side_effect=AssertionError))
    rank_store.tell_reason("rank 0 failed")
    assert rank_store.told_reason() is None


def test_the_second_signal_gives_the_exit_status(monkeypatch):
    forwarding = launch._Forwarding()
    forwarding.begin(SimpleNamespace(pids=dict))
    try:
        forwarding._forward(signal.SIGUSR1, None)
        forwarding._forward(signal.SIGUSR1, None)  # a duplicate of the first signal, from another process
        later = time.monotonic() + 2
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(launch._StoppedError) as stopped:
            forwarding._forward(signal.SIGTERM, None)
    finally:
        forwarding.end()
    assert stopped.value.signum == signal.SIGTERM


def test_what_follows_from_another_rank_is_told_apart():
    mistakes = (ValueError, DivergedError)
    assert kind_of(torch.distributed.DistNetworkError("closed"), mistakes) == "lost connection"
    assert kind_of(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed"), mistakes) == "lost connection"
    assert kind_of(OutOfMemoryError("out of memory"), mistakes) == "out of memory"
    assert kind_of(DivergedError("5 steps"), mistakes) == "mistake"
    assert kind_of(RuntimeError("shape"), mistakes) == "error"


@pytest.mark.parametrize(("in_sweep", "out_of_memory"), [(True, True), (True, False), (False, True)])
def test_running_out_of_memory_is_a_result_of_a_sweep(in_sweep, out_of_memory, tmp_path, monkeypatch):
    def launched(n_ranks, arguments, decisions):
        composing = ["hydra.searchpath=[b]", "hydra/job_logging=none", "~hydra.runtime.x", "hydra.job.num=7"]
        assert arguments == (["--config-dir=mine", *composing, "seq_len=8"] if in_sweep else sys.argv[1:])
        assert decisions == {"folder": str(tmp_path), "sweep_group": "sweep" if in_sweep else None}
        raise RankFailedError("rank 1 ran out of memory", out_of_memory=out_of_memory)

    of_launcher = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=a", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"]
    of_launcher += ["hydra/launcher=joblib", "++hydra.launcher.n_jobs=2", "hydra.run.dir=a"]
    composing = ["hydra.searchpath=[b]", "hydra/job_logging=none", "~hydra.runtime.x"]
    hydra = SimpleNamespace(
        runtime=SimpleNamespace(output_dir=str(tmp_path)), sweep=SimpleNamespace(dir="sweep"),
        overrides=SimpleNamespace(task=["seq_len=8"], hydra=[*of_launcher, *composing]), job=SimpleNamespace(num=7),
    )  # fmt: skip
    monkeypatch.setattr(run_config, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setattr(run_config, "in_sweep", lambda: in_sweep)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "--config-dir", "mine", "seq_len=8,16"])
    monkeypatch.setattr(launch, "launch", launched)
    if in_sweep and out_of_memory:
        assert run_config.launch_ranks(2) == {"oom": 1.0}
    else:
        with pytest.raises(RankFailedError):
            run_config.launch_ranks(2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({DECISIONS: '{"folder": "/runs/of the launcher"}'}, "/runs/of the launcher", id="train.py"),
        pytest.param({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, "/runs/of rank 0", id="torchrun"),
        pytest.param({}, "/runs/of this process", id="one-process"),
    ],
)
def test_ranks_use_one_folder(variables, expected, environment):
    def from_store(ranks, question, decide):
        assert question == "hydra.run.dir" and decide() == "/runs/of this process"
        return "/runs/of rank 0"

    for name, value in variables.items():
        environment.setenv(name, value)
    environment.setattr(rank_store, "cluster_environment", lambda: "two" if "WORLD_SIZE" in variables else None)
    environment.setattr(rank_store, "decided_through_store", from_store)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        given = ["hydra.run.dir=/runs/${run_name}", "run_name=of this process", "hydra.mode=RUN"]
        cfg = compose("train", given, return_hydra_config=True)
    instantiate(cfg.hydra.callbacks.one_folder).on_run_start(cfg, config_name="train")
    assert cfg.hydra.run.dir == expected


def test_an_invalid_folder_is_an_error_of_hydra(environment):
    """The callback itself does not raise the error, because Hydra would only print a warning."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["run_name=../x", "hydra.mode=RUN"], return_hydra_config=True)
    run_config.OneFolder().on_run_start(cfg)
    with pytest.raises(ValueError, match="run_name must be the name of a folder below runs/"):
        str(cfg.hydra.run.dir)


def test_the_ranks_of_a_multirun_use_its_config():
    given = ["-m", "seq_len=8,16", "-cn", "other", "--config-path=/conf", "-cd=mine"]
    assert run_config.config_options(given) == ["--config-dir=mine", "--config-name=other", "--config-path=/conf"]
    assert run_config.config_options(["-m", "seq_len=8"]) == []


NCCL = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")


@pytest.mark.parametrize(
    "strategy", [DDPStrategy, partial(FullyShardedStrategy, 1, True, False, "float32")], ids=["ddp", "fsdp"]
)
def test_nccl_has_a_short_timeout_and_a_flight_recorder(strategy, monkeypatch):
    for name in (*NCCL, "TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    trainer = SimpleNamespace(world_size=1, default_root_dir="/run", strategy=strategy())
    communication.configure(trainer, has_timeout=False)
    assert not os.environ.keys() & {*NCCL, "TORCH_NCCL_HIGH_PRIORITY"}
    trainer.world_size = 2
    communication.configure(trainer, has_timeout=False)
    assert trainer.strategy._timeout == timedelta(minutes=10)
    assert [os.environ[name] for name in NCCL] == ["1", "2000", "/run/nccl_trace_rank_"]
    assert os.environ.get("TORCH_NCCL_HIGH_PRIORITY") == ("1" if strategy is DDPStrategy else None)


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")  # the older name of TORCH_FR_BUFFER_SIZE
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    strategy = DDPStrategy(timeout=timedelta(minutes=3))
    trainer = SimpleNamespace(world_size=2, default_root_dir="/run", strategy=strategy)
    communication.configure(trainer, has_timeout=False)
    assert strategy._timeout == timedelta(minutes=3), "a strategy of the user's own can set its timeout"
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("given", "minutes"), [((), 10), (("+strategy.timeout={_target_: datetime.timedelta, minutes: 30}",), 30)],
    ids=["default", "equal-to-torch's-default"],
)  # fmt: skip
def test_the_config_gives_the_timeout_of_ddp(given, minutes, tmp_path):
    with composed(tmp_path, *tiny(tmp_path, "strategy=ddp", "trainer.devices=2", *given)) as cfg:
        trainer, _, _ = training.build(cfg)
    assert trainer.strategy._timeout == timedelta(minutes=minutes)


def sbatch_script() -> str:
    page = (REPOSITORY / "docs" / "several_gpus.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return script


@pytest.mark.parametrize(
    ("ending", "requeued"), [("trap 'exit 138' USR1; touch ready; sleep 0.05; sleep 0.05; sleep 0.05", True),
                             ("touch ready; exit 7", False), ("touch ready; exit 0", False)],
    ids=["preempted", "failed", "done"],
)  # fmt: skip
def test_the_sbatch_script_requeues_a_run_that_sigusr1_has_ended(ending, requeued, tmp_path):
    """Only the batch script gets the signal, as in SLURM with --signal=B:USR1."""
    say = 'printf "%s\\n" "$@" $WANDB_RESUME $WANDB_RUN_ID >arguments'
    run = f"{say}; {ending}; for i in $(seq 100); do sleep 0.05; done; exit 9"
    stand_ins = {"srun": 'shift; exec "$@"', "python": run, "scontrol": 'echo "$@" >requeued'}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "train.sbatch").write_text(sbatch_script())
    (tmp_path / "runs/mine/now/checkpoints/step_0000001.ckpt").mkdir(parents=True)
    environment = quiet_environment() | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "mine",
    }  # fmt: skip
    job = subprocess.Popen(["bash", "train.sbatch", "seq_len=8", "data.path=a b"], cwd=tmp_path, env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    if requeued:
        job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == (138 if requeued else int(ending[-1]))
    arguments = ["train.py", "trainer.devices=8", "run_name=mine", "ckpt_path=last", "seq_len=8", "data.path=a b"]
    arguments += ["allow", "42"]  # W&B continues the run with this id
    assert (tmp_path / "arguments").read_text().splitlines() == arguments
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 42\n"


def test_other_machines_learn_which_rank_made_a_mistake(monkeypatch):
    """A mistake of the user can exist on only one of several machines, for example a missing folder."""
    told: list[str] = []
    monkeypatch.setattr(rank_store, "tell_reason", told.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    assert failures._shared("mistake", "data.path must exist") == "data.path must exist"
    assert failures._shared("out of memory", "out of memory") == "rank 1 ran out of memory"
    assert told == ["rank 1 failed: data.path must exist", "rank 1 ran out of memory"]
