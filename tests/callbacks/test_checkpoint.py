"""Tests which checkpoint a run keeps as the best one, which it exports, and whether it saves one after an error."""

import os
import signal
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fa_train.callbacks import checkpoint
from fa_train.checkpoints.files import CheckpointError
from fa_train.errors import DivergedError
from tests.support.runs import run
from tests.support.training import column

pytestmark = pytest.mark.slow
BEST = ("callbacks.checkpoint.keep_best=true", "trainer.val_check_interval=1")

# This override gives a step one micro-batch. With several micro-batches, a test would not notice if a step's checkpoint
# were written during the next step.
ONE_MICRO_BATCH = "data.micro_batch_size=4"


def losses(values: str) -> list[str]:
    """Returns overrides that replace a run's validation losses by the losses in `values`, for example [3,2,4,5,6]."""
    return [
        "+callbacks.losses._target_=tests.checkpoints.support.callbacks.Losses",
        f"+callbacks.losses.losses={values}",
    ]


def steps_kept(folder) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("values", "best"),
    [
        pytest.param("[3,2,4,5,6]", 2),
        pytest.param("[3,2,1,5,6]", 3),
        pytest.param("[nan,7,8,9,10]", 2),
    ],
    ids=str,
)
def test_the_best_is_kept_too_if_asked(values, best, tmp_path):
    often = ("max_steps=5", "callbacks.checkpoint.every_n_train_steps=2")
    _, folder = run(tmp_path, *BEST, *often, *losses(values))
    assert steps_kept(folder) == [best, 4, 5]


def test_a_resumed_run_keeps_only_a_better_checkpoint(tmp_path):
    newest = "callbacks.checkpoint.save_top_k=1"
    _, first = run(tmp_path, *BEST, newest, "max_steps=2", *losses("[3,1]"), name="first")
    resume = f"ckpt_path={first}/checkpoints/step_0000002.ckpt"
    _, rest = run(tmp_path, *BEST, newest, "max_steps=5", *losses("[2,2,2]"), resume, name="rest")
    assert steps_kept(rest) == [5]


def test_a_resumed_run_knows_the_validation_of_the_step_that_it_starts_from(tmp_path):
    often = "callbacks.checkpoint.every_n_train_steps=1"
    _, first = run(tmp_path, *BEST, often, "max_steps=3", *losses("[3,1,2]"), name="first")
    resume = f"ckpt_path={first}/checkpoints/step_0000002.ckpt"
    newest = "callbacks.checkpoint.save_top_k=1"
    _, rest = run(tmp_path, *BEST, often, newest, "max_steps=5", *losses("[2,2,2]"), resume, name="rest")
    assert steps_kept(rest) == [5]


def test_steps_with_and_without_a_validation_are_saved(tmp_path):
    often = ("callbacks.checkpoint.every_n_train_steps=2", "callbacks.checkpoint.save_top_k=-1")
    settings = ("callbacks.checkpoint.keep_best=true", "trainer.val_check_interval=4", "max_steps=9")
    _, folder = run(tmp_path, *settings, *often, *losses("[1,2]"), ONE_MICRO_BATCH)
    assert steps_kept(folder) == [2, 4, 6, 8, 9]


def test_steps_are_saved_without_held_out_data(tmp_path):
    often = ("callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1")
    _, folder = run(tmp_path, *BEST, *often, "max_steps=2", "data.val_rows=0", ONE_MICRO_BATCH)
    assert steps_kept(folder) == [1, 2]


def test_a_run_goes_on_from_its_best_checkpoint(tmp_path):
    settings = ("callbacks.checkpoint.keep_best=true", "trainer.val_check_interval=3", "max_steps=8")
    _, whole = run(tmp_path, *settings, "callbacks.checkpoint.save_top_k=-1", name="whole")
    _, rest = run(tmp_path, *settings, f"ckpt_path={whole}/checkpoints/step_0000003.ckpt", name="rest")
    expected = {step: loss for step, loss in column(whole, "train/loss").items() if step > 3}
    assert column(rest, "train/loss") == expected


class StopAfterValidation(Callback):
    def on_validation_end(self, trainer, pl_module) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class StopInMicroBatch(Callback):
    """Sends SIGTERM in micro-batch `number`, counted from 0."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.number:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("number", "saved"), [(0, False), (1, True)], ids=["no-step", "one-step"])
def test_a_run_that_is_stopped_in_its_first_step_says_that_it_saved_nothing(number, saved, tmp_path, capsys):
    stop = (f"+callbacks.stop._target_={__name__}.StopInMicroBatch", f"+callbacks.stop.number={number}")
    with pytest.raises(SystemExit):
        run(tmp_path, *stop, "data.micro_batch_size=2", "batch_size=4")
    printed = capsys.readouterr().out
    assert ("no checkpoint was saved, because the run stopped in its first step" in printed) == (not saved)
    assert ("resumes from it" in printed) == saved


class FailInMicroBatch(StopInMicroBatch):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.number:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for")


def test_a_run_whose_gpu_has_failed_keeps_its_error_its_logs_and_its_older_checkpoint(tmp_path, monkeypatch, capsys):
    """After an illegal memory access, every later use of the GPU raises an error, including those of a save."""

    def all_finite(weights):
        if saves:
            raise torch.AcceleratorError("CUDA error: again\nSearch for")
        saves.append(2)
        return True

    saves: list[int] = []
    monkeypatch.setattr("fa_train.callbacks.checkpoint.all_finite", all_finite)
    fail = (f"+callbacks.fail._target_={__name__}.FailInMicroBatch", "+callbacks.fail.number=3")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        run(tmp_path, *fail, "data.micro_batch_size=4", "callbacks.checkpoint.every_n_train_steps=2")
    printed = capsys.readouterr().out
    assert "error: step 3 was not saved: AcceleratorError: CUDA error: again\n" in printed
    assert "step_0000002.ckpt; " in printed and list(column(tmp_path / "run", "train/loss")) == [1, 2, 3]


@pytest.mark.parametrize("stopped", [False, True], ids=["extended", "stopped"])
def test_callbacks_of_lightning_log_the_steps_of_a_run_never_stopped(stopped, tmp_path):
    rates = "+callbacks.rates._target_=lightning.pytorch.callbacks.LearningRateMonitor"
    settings = (rates, "scheduler.max_steps=5")
    _, whole = run(tmp_path, *settings, "max_steps=5", name="whole")
    stop = f"+callbacks.stop._target_={__name__}.StopAfterValidation"
    end = ("max_steps=5", stop) if stopped else ("max_steps=3",)
    with pytest.raises(SystemExit) if stopped else nullcontext():
        run(tmp_path, *settings, *end, "trainer.val_check_interval=3", name="first")
    resume = f"ckpt_path={tmp_path}/first/checkpoints/step_0000003.ckpt"
    interval = 3 if stopped else 2
    _, rest = run(tmp_path, *settings, "max_steps=5", f"trainer.val_check_interval={interval}", resume, name="rest")
    expected = {step: rate for step, rate in column(whole, "lr-AdamW/pg1").items() if step >= 3}
    assert len(expected) == 2 and column(rest, "lr-AdamW/pg1") == expected


@pytest.mark.parametrize("interval", [2, 3], ids=["no-last-validation", "last-validation"])
def test_a_finished_run_with_averaged_weights_is_extended_from_the_weights_of_its_last_step(interval, tmp_path):
    averaged = "+callbacks.average._target_=lightning.pytorch.callbacks.EMAWeightAveraging"
    _, whole = run(tmp_path, averaged, "max_steps=5", name="whole")
    validated = f"trainer.val_check_interval={interval}"
    _, first = run(tmp_path, averaged, "max_steps=3", "scheduler.max_steps=5", validated, name="first")
    resume = f"ckpt_path={first}/checkpoints/step_0000003.ckpt"
    _, rest = run(tmp_path, averaged, "max_steps=5", resume, name="rest")
    losses = column(whole, "train/loss")
    assert column(rest, "train/loss") == {step: losses[step] for step in (4, 5)}


def test_a_resumed_run_without_time_left_exports_its_checkpoint(tmp_path):
    _, first = run(tmp_path, "max_steps=2", "model=llama_1b", name="first")
    resume = f"ckpt_path={first}/checkpoints/step_0000002.ckpt"
    no_time = ("+trainer.max_time=00:00:00:00", "export=true", "max_steps=4")
    _, rest = run(tmp_path, "model=llama_1b", resume, *no_time, name="rest")
    assert (rest / "exported" / "config.json").exists()


def test_a_run_without_time_for_a_step_exports_nothing(tmp_path):
    with pytest.raises(ValueError, match="export=true needs at least one training step"):
        run(tmp_path, "+trainer.max_time=00:00:00:00", "export=true", "model=llama_1b")


def test_a_run_without_validation_says_that_no_best_is_kept(tmp_path, capsys):
    run(tmp_path, "callbacks.checkpoint.keep_best=true", "max_steps=1", "trainer.val_check_interval=2")
    message = "no validation: max_steps=1 is below trainer.val_check_interval=2. keep_best has no effect\n"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("adapter", "change", "message"),
    [
        pytest.param("none", "model.rope_theta=77", r"rope_theta=500000.0; the export has 77\b", id="model"),
        pytest.param("lora", "adapter.lora_alpha=7", r"lora_alpha=32; the export has 7\b", id="adapter"),
    ],
)
def test_a_finished_run_is_not_exported_with_other_settings(adapter, change, message, tmp_path):
    settings = "model=llama_1b", f"adapter={adapter}", "max_steps=1"
    _, first = run(tmp_path, *settings, name="first")
    resume = f"ckpt_path={first}/checkpoints/step_0000001.ckpt"
    with pytest.raises(ValueError, match=rf"must be exported with the settings of its training: .*{message}"):
        run(tmp_path, *settings, resume, "export=true", change, name="rest")
    assert not list(tmp_path.glob("rest/exported*"))


@pytest.mark.parametrize(
    ("error", "changes", "may_save"),
    [
        pytest.param(RuntimeError(), {}, True, id="error"),
        pytest.param(RuntimeError(), {"ranks": 2}, False, id="error-of-two-ranks"),
        pytest.param(RuntimeError(), {"update_after": 3}, False, id="half-update"),
        pytest.param(RuntimeError(), {"diverged": True}, False, id="diverged-before-the-error"),
        pytest.param(RuntimeError(), {"wanted": False}, False, id="unwanted"),
        pytest.param(CheckpointError(), {}, False, id="checkpoint-error"),
        pytest.param(DivergedError(), {}, False, id="diverged"),
        pytest.param(SIGTERMException(), {"ranks": 2}, True, id="signal"),
        pytest.param(SIGTERMException(), {"diverged": True}, False, id="signal-after-divergence"),
    ],
)
def test_which_failed_runs_save_a_checkpoint(error, changes, may_save, tmp_path, monkeypatch):
    case = {"ranks": 1, "update_after": 2, "diverged": False, "wanted": True} | changes
    monkeypatch.setattr(checkpoint, "monitor_of", lambda trainer: Mock(has_diverged=case["diverged"]))
    callback = checkpoint.Checkpoint(str(tmp_path), "mine", 1, 1, False, case["wanted"], asynchronous=False)
    callback._update_after = case["update_after"]
    assert callback._may_save(Mock(world_size=case["ranks"], global_step=3), error) == may_save
