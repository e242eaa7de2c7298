"""Four ranks write checkpoints while training continues."""

import io
import mmap
import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from fa_train.callbacks.checkpoint import Checkpoint, Save
from fa_train.callbacks.interrupt import GracefulInterrupt
from fa_train.callbacks.monitor import Monitor
from fa_train.checkpoints.files import CheckpointError, read_file, write_file
from fa_train.checkpoints.resume import checkpoint_path
from fa_train.parallel.background_save import BackgroundSave, HostCopies, pinnable_like
from fa_train.parallel.sharded_checkpoint import require_whole
from tests.parallel.support.runs import train_in
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import column, write_corpus

CPU = torch.device("cpu")


def state() -> dict:
    weight = torch.arange(6.0).reshape(2, 3)
    weights = OrderedDict({"embedding": weight, "head": weight, "bias": torch.zeros(0)})
    return {"state_dict": weights, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, [1])}}


def test_a_copy_keeps_its_values_and_ties():
    original = state()
    copied = HostCopies(CPU).of(original)
    original["state_dict"]["embedding"].zero_()
    original["optimizer"]["betas"][1].append(2)
    weights = copied["state_dict"]
    assert type(weights) is OrderedDict and weights["head"] is weights["embedding"], "a tied weight is stored once"
    assert torch.equal(weights["embedding"], torch.arange(6.0).reshape(2, 3))
    assert copied["optimizer"]["betas"] == (0.9, [1]) and copied["optimizer"]["state"][0]["step"] == 3


@pytest.mark.parametrize("x", [torch.ones(3, 5), torch.ones(5, 3).t(), torch.ones(2, 4)[:, ::2], torch.ones(()).half()])
def test_pinnable_memory_is_like_the_tensor_and_shares_no_page(x):
    first, second = pinnable_like(x), pinnable_like(x)
    assert (first.dtype, first.shape, first.stride()) == (x.dtype, x.shape, torch.empty_like(x).stride())
    assert {memory.data_ptr() % mmap.PAGESIZE for memory in (first, second)} == {0}
    first.copy_(x)
    assert torch.equal(first, x) and not second.any()


def test_the_next_copy_reuses_the_memory():
    copies, original = HostCopies(CPU), state()
    first = copies.of(original)["state_dict"]["embedding"]
    original["state_dict"]["embedding"] += 1
    second = copies.of(original)["state_dict"]["embedding"]
    assert first is second and torch.equal(second, original["state_dict"]["embedding"])
    original["state_dict"]["embedding"] = torch.ones(4, dtype=torch.float64)
    assert torch.equal(copies.of(original)["state_dict"]["embedding"], torch.ones(4, dtype=torch.float64))


@pytest.fixture
def background():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield BackgroundSave(CPU)
    dist.destroy_process_group()


@needs_ports
def test_a_file_holds_the_values_at_the_start_of_the_save(background, tmp_path):
    weight, may_write = torch.ones(3), threading.Event()

    def write(content: dict) -> None:
        may_write.wait()
        write_file(content, tmp_path / "x.ckpt.partial")

    background.start({"global_step": 1, "weight": weight}, write, tmp_path / "x.ckpt.partial")
    assert [background.done_everywhere() for _ in range(3)] == [False] * 3
    weight.zero_()
    may_write.set()
    background.finish()
    assert torch.equal(read_file(tmp_path / "x.ckpt")["weight"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


@needs_ports
@pytest.mark.parametrize("alone", [True, False])
def test_an_error_in_the_thread_is_raised_by_finish(alone, background, tmp_path):
    def write(content: dict) -> None:
        raise OSError(28, "No space left on device")

    background.start({}, write, tmp_path / "x.ckpt.partial")
    if alone:
        assert not background.finish_alone(60)
    else:
        with pytest.raises(CheckpointError, match=r"x.ckpt could not be written: No space left on device"):
            background.finish()


@needs_ports
def test_a_failing_run_does_not_wait_forever(background, tmp_path):
    may_write = threading.Event()
    background.start({}, lambda content: may_write.wait(), tmp_path / "x.ckpt.partial")
    assert not background.finish_alone(0.01)
    (tmp_path / "x.ckpt.partial").touch()
    may_write.set()
    assert background.finish_alone(60) and (tmp_path / "x.ckpt").exists()


@needs_ports
def test_a_signal_after_a_failed_save_saves_once_more(background, tmp_path):
    def save_checkpoint(partial: Path, storage_options: BackgroundSave | None = None) -> None:
        if storage_options is None:
            write_file({"global_step": 2}, partial)
        else:
            storage_options.start({}, fail, partial)

    def fail(content: dict) -> None:
        raise OSError(28, "No space left on device")

    strategy = SimpleNamespace(
        root_device=CPU, broadcast=lambda value: value, reduce_boolean_decision=lambda finite, all: finite
    )
    trainer, said = Mock(world_size=2, global_step=1, fast_dev_run=False, strategy=strategy, loggers=[]), []
    trainer.callbacks, trainer.print, trainer.save_checkpoint = [Monitor(1, 1, None)], said.append, save_checkpoint
    module = torch.nn.Linear(1, 1)
    checkpoint = Checkpoint(str(tmp_path), "mine", 1, 2, keep_best=False, save_on_exception=True, asynchronous=True)
    checkpoint._background, checkpoint.saved = background, [tmp_path / "step_0000001.ckpt"]
    checkpoint.on_train_start(trainer, module)
    trainer.global_step = 2
    checkpoint.on_train_batch_end(trainer, module, None, None, 0)
    checkpoint.on_exception(trainer, module, SIGTERMException())
    assert read_file(tmp_path / "step_0000002.ckpt")["global_step"] == 2
    assert said[0].endswith("step_0000002.ckpt could not be written: No space left on device")
    path = tmp_path / "step_0000002.ckpt"
    assert said[1:] == [f"checkpoint: {path}; ckpt_path={path} resumes from it"]


@needs_ports
def test_a_rank_that_loses_another_rank_first_finishes_its_checkpoint(background, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda status: print(f"status {status}"))
    monkeypatch.setattr(signal, "signal", Mock())  # SIGTERM, which the launcher sends now, is ignored
    path, may_write = tmp_path / "step_0000002.ckpt", threading.Event()
    partial = tmp_path / "step_0000002.ckpt.partial"

    def write(content: dict) -> None:
        may_write.wait()
        write_file(content, partial)

    checkpoint = Checkpoint(str(tmp_path), "mine", 1, 2, keep_best=False, save_on_exception=True, asynchronous=True)
    checkpoint._background, checkpoint._save_in_flight = background, Save(path, step=2)
    trainer = Mock(world_size=2, print=print, loggers=[], checkpoint_callback=checkpoint)
    trainer.callbacks = [Monitor(1, 1, None), checkpoint]
    background.start({"global_step": 2}, write, partial)
    threading.Timer(0.1, may_write.set).start()
    GracefulInterrupt().on_exception(trainer, Mock(), RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed"))
    assert read_file(path)["global_step"] == 2
    signal.signal.assert_called_once_with(signal.SIGTERM, signal.SIG_IGN)
    assert capsys.readouterr().out.splitlines() == [f"checkpoint: {path}; ckpt_path={path} resumes from it", "status 1"]


class KilledWhileSaving(Callback):
    """After step 7, kills a rank that is still writing the checkpoint of step 6."""

    def __init__(self, rank: int) -> None:
        self.rank, self.save, self.step_seven = rank, torch.save, threading.Event()
        self.prepared = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 6 and not self.prepared:  # with two ranks, a step of a rank has two micro-batches
            self.prepared = True
            trainer.checkpoint_callback._finish(trainer)  # finish the save of step 4: the kill must hit the next save
            if trainer.global_rank == self.rank:
                torch.save = self.die  # type: ignore[assignment]
        if trainer.global_step == 7:
            self.step_seven.set()

    def die(self, content, file) -> None:
        whole = io.BytesIO()
        self.save(content, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        assert self.step_seven.wait(60), "training must go on during the save"
        os.kill(os.getpid(), signal.SIGKILL)


SETTINGS = ("data.val_rows=4", "max_steps=8", "trainer.val_check_interval=3")
FSDP = (*SETTINGS, "strategy=fsdp")
BEST = (  # the validation loss is lower at step 3 than at step 6
    "callbacks.checkpoint.every_n_train_steps=3", "callbacks.checkpoint.save_top_k=1",
    "callbacks.checkpoint.keep_best=true", "+callbacks.losses._target_=tests.checkpoints.support.callbacks.Losses",
    "+callbacks.losses.losses=[2,3]",
)  # fmt: skip
KILLED = (
    "callbacks.checkpoint.every_n_train_steps=2",
    "+callbacks.kill._target_=tests.parallel.test_background_save.KilledWhileSaving",
)
STEP_THREE = "four/checkpoints/step_0000003.ckpt"


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("background")
    for number in range(100):
        (write_corpus(folder / "corpus") / f"more_{number}.txt").write_text(f"{number} more " * 20)
    return folder


@pytest.fixture(scope="module")
def losses(shared) -> dict[int, float]:
    return column(train_in(shared / "one", shared, *SETTINGS), "train/loss")


def start_ranks(number: int, shared: Path, killed: int) -> None:
    start_server()
    arguments = (number, str(shared), ranks_of_torchrun(number), killed)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        torch.multiprocessing.start_processes(in_processes, args=arguments, nprocs=number, start_method="forkserver")


def in_processes(rank: int, number: int, folder: str, environments: list[dict[str, str]], killed: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    shared, ranks = Path(folder), (*FSDP, f"trainer.devices={number}")
    if number == 4:
        train_in(shared / "four", shared, *ranks, *BEST)
    killing = (*KILLED, f"+callbacks.kill.rank={killed}", f"ckpt_path={shared}/{STEP_THREE}")
    train_in(shared / f"{number}_from_four", shared, *ranks, *killing)


@pytest.fixture(scope="module")
def four_ranks(shared) -> Path:
    start_ranks(4, shared, killed=0)
    return shared


@pytest.fixture(scope="module")
def two_ranks(four_ranks) -> Path:
    start_ranks(2, four_ranks, killed=1)
    return four_ranks


@needs_ports
@pytest.mark.slow
def test_four_ranks_train_like_one_and_log_how_long_they_stood_still(losses, four_ranks):
    four = column(four_ranks / "four", "train/loss")
    assert sorted(losses) == list(range(1, 9)) and four == pytest.approx(losses, rel=1e-5)
    stalls, saves = (column(four_ranks / "four", f"perf/{name}_s") for name in ("save_stall", "save"))
    assert 8 in stalls and all(0 < stalls[step] <= saves[step] for step in stalls)


@needs_ports
@pytest.mark.slow
def test_the_newest_and_the_best_are_kept(four_ranks):
    left = sorted(path.name for path in (four_ranks / "four" / "checkpoints").iterdir())
    assert left == ["step_0000003.ckpt", "step_0000008.ckpt"]


@needs_ports
@pytest.mark.slow
def test_one_rank_goes_on_from_four(shared, losses, four_ranks):
    require_whole(four_ranks / STEP_THREE)
    rest = column(
        train_in(shared / "one_from_four", shared, *SETTINGS, f"ckpt_path={shared}/{STEP_THREE}"), "train/loss"
    )
    assert rest == pytest.approx({step: losses[step] for step in range(4, 9)}, rel=1e-5)


@needs_ports
@pytest.mark.slow
@pytest.mark.parametrize(("number", "killed"), [(4, 0), (2, 1)])
def test_ranks_go_on_from_four_and_a_kill_in_a_save_leaves_the_older_checkpoint(number, killed, losses, request):
    run = request.getfixturevalue("four_ranks" if number == 4 else "two_ranks") / f"{number}_from_four"
    rest = column(run, "train/loss")
    assert min(rest) == 4 and max(rest) >= 6, "training goes on during the save of step 6"
    assert rest == pytest.approx({step: losses[step] for step in rest}, rel=1e-5)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["step_0000004.ckpt", "step_0000006.ckpt.partial"]
    assert checkpoint_path("last", run) == str(run / "checkpoints" / "step_0000004.ckpt")
