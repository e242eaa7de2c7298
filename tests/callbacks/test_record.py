"""Tests what a run prints and uploads at its end."""

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from wandb.sdk.artifacts.staging import get_staging_dir

from fa_train import training
from fa_train.callbacks import record
from fa_train.callbacks.record import Record
from fa_train.errors import TrainedWeightsError
from tests.support.runs import run
from tests.support.training import composed, tiny


class Ends(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = trainer.global_step > 0


EARLY = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, stopping_threshold: 99}"


def test_a_home_that_wandb_cannot_write_is_a_mistake_in_one_line(monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", "/dev/null/wandb")
    fake = Mock()  # a run of W&B
    fake.log = lambda _: get_staging_dir()
    monkeypatch.setattr(record, "wandb_run", lambda _: fake)
    trainer = Mock(loggers=[])
    trainer.datamodule.packing_report().charts.return_value = {}
    with pytest.raises(ValueError, match=r"wandb needs a folder .* /dev/null/wandb/.* set WANDB_DATA_DIR"):
        Record().on_fit_start(trainer, pl_module=Mock())


@pytest.mark.parametrize(
    ("mode", "printed"), [("disabled", []), ("offline", ["wandb: folder"]), ("online", ["wandb: url"])]
)
def test_a_run_says_where_wandb_records_it_unless_wandb_is_disabled(mode, printed, monkeypatch):
    fake = Mock(disabled=mode == "disabled", offline=mode == "offline", url="url", settings=Mock(sync_dir="folder"))
    monkeypatch.setattr(record, "wandb_run", lambda _: fake)
    trainer = Mock(loggers=[])
    trainer.datamodule.packing_report().charts.return_value = {}
    Record().on_fit_start(trainer, pl_module=Mock())
    assert [call.args[0] for call in trainer.print.call_args_list] == printed


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (wandb.errors.UsageError("Run ID is wrong"), r"got UsageError: Run ID is wrong$"),
        (wandb.errors.CommError("no answer"), r"got CommError: no answer\. logger\.mode=offline needs no server$"),
    ],
    ids=["usage", "network"],
)
def test_a_wandb_run_that_cannot_start_is_a_mistake_in_one_line(error, message, tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.init", Mock(side_effect=error))
    with (
        composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.mode=offline")) as cfg,
        pytest.raises(ValueError, match=f"^wandb must start a run; {message}"),
    ):
        training.train(cfg)


class RefusesConfig(CSVLogger):
    def log_hyperparams(self, params=None) -> None:
        raise RuntimeError("a user's logger")


def test_an_error_of_another_logger_leaves_no_open_wandb_run(tmp_path, monkeypatch):
    """The next job of a multirun would write to the open run."""
    started = Mock(finish=Mock(side_effect=lambda exit_code: monkeypatch.setattr("wandb.run", None)))
    monkeypatch.setattr("wandb.init", lambda **_: monkeypatch.setattr("wandb.run", started) or started)
    own = "{_target_: tests.callbacks.test_record.RefusesConfig, save_dir: .}"
    overrides = ("logger=wandb", "logger.mode=offline", f"trainer.logger=[${{logger}},{own}]")
    with composed(tmp_path, *tiny(tmp_path, *overrides)) as cfg, pytest.raises(RuntimeError, match="a user's logger"):
        training.train(cfg)
    started.finish.assert_called_once_with(exit_code=1)


@pytest.mark.parametrize("ends", [False, True], ids=["failed", "finished"])
def test_a_wandb_run_that_cannot_be_closed_only_prints_an_error(ends, monkeypatch):
    """If Record raised the error, Checkpoint would not save a failed run, and a finished run would not be exported."""
    fake, trainer = Mock(), Mock(is_global_zero=False, loggers=[], global_step=1, max_steps=1)
    fake.finish.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(record, "wandb_run", lambda _: fake)
    monkeypatch.setattr(record, "monitor_of", lambda _: Mock(summary=dict))
    Record().on_fit_end(trainer, None) if ends else Record().on_exception(trainer, None, RuntimeError())
    assert "W&B run was not closed: OSError: [Errno 28] No space left" in trainer.print.call_args.args[0]


@pytest.mark.parametrize("folder", ["mine", Path("mine"), None, "s3://bucket/x"], ids=str)
def test_only_local_folders_of_loggers_are_created(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record.require_folders(Mock(loggers=[Mock(save_dir=folder)]))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] * (str(folder) == "mine")


def test_a_wandb_logger_that_cannot_finish_only_prints_an_error(monkeypatch):
    finalize = Mock(side_effect=OSError(28, "No space left on device"))
    logger, other, fake = Mock(spec=WandbLogger, finalize=finalize), Mock(), Mock(disabled=True)
    trainer = Mock(is_global_zero=False, loggers=[logger, other], global_step=1, max_steps=1)
    trainer.datamodule.packing_report.return_value = Mock(charts=dict)
    monkeypatch.setattr(record, "wandb_run", lambda _: fake)
    monkeypatch.setattr(record, "monitor_of", lambda _: Mock(summary=dict))
    callback = Record()
    callback.on_fit_start(trainer, None)
    callback.on_fit_end(trainer, None)
    assert "Mock did not finish: OSError: [Errno 28]" in trainer.print.call_args.args[0] and fake.finish.called
    logger.finalize("success")  # as Lightning does
    assert finalize.call_count == trainer.print.call_count - 1 == 1


class CannotFinish(CSVLogger):
    def finalize(self, status: str) -> None:
        raise RuntimeError("a user's logger")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_a_logger_that_cannot_finish_prevents_no_export_and_hides_no_error(fails, tmp_path, capsys):
    overrides = ["max_steps=2", "export=true", "model=llama_1b", f"logger._target_={__name__}.CannotFinish"]
    if fails:
        with pytest.raises(RuntimeError, match="the first error"):
            run(tmp_path, *overrides, f"+callbacks.fails._target_={__name__}.Fails")
    else:
        _, folder = run(tmp_path, *overrides)
        assert (folder / "exported/config.json").exists()
    assert capsys.readouterr().out.count("error: CannotFinish did not finish: RuntimeError: a user's logger\n") == 1


def test_a_full_disk_leaves_no_unfinished_result(tmp_path, monkeypatch):
    """An empty result.json would make scripts.export_hf fail later, so an earlier result.json is kept."""

    def half(path, text):
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")

    trainer = Mock(is_global_zero=True, default_root_dir=str(tmp_path))
    monkeypatch.setattr(record, "monitor_of", lambda _: Mock(summary=lambda: {"train/loss": 1.0}))
    Record()._write(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    monkeypatch.setattr("pathlib.Path.write_text", half)
    Record()._write(trainer)
    assert "result.json was not written" in trainer.print.call_args.args[0]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # of the earlier run


def test_a_run_that_has_measured_nothing_keeps_an_earlier_result(tmp_path, monkeypatch):
    trainer, results = Mock(is_global_zero=True, default_root_dir=str(tmp_path)), []
    for measured in ({}, {"train/loss": 1.0}, {}):
        monkeypatch.setattr(record, "monitor_of", lambda _, measured=measured: Mock(summary=lambda: measured))
        Record()._write(trainer)
        results.append(json.loads((tmp_path / "result.json").read_text()))
    assert results == [{}, {"train/loss": 1.0}, {"train/loss": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "reason", "has_loss"),
    [
        ("+trainer.max_time=00:00:00:00", "step 0 of 4: the time of trainer.max_time is over", False),
        (f"+callbacks.early={EARLY}", r"step 1 of 4: Stopping threshold reached: val/loss = \d+\.\d+ < 99\.", True),
        (f"+callbacks.ends._target_={__name__}.Ends", "step 1 of 4: a callback has set trainer.should_stop", True),
    ],
    ids=["time", "early-stopping", "other"],
)
def test_a_run_that_ends_early_says_why_and_logs_the_loss_of_its_last_step(
    override, reason, has_loss, tmp_path, capsys
):
    settings = "max_steps=4", "trainer.val_check_interval=1", "trainer.log_every_n_steps=3", override
    with composed(tmp_path, *tiny(tmp_path, *settings)) as cfg:
        result = training.train(cfg)
    assert ("train/loss" in result) == has_loss
    printed = capsys.readouterr().out
    assert re.search(f"^stopped after {reason}$", printed, re.MULTILINE)
    assert ("\ndone: no step was trained\n" in printed) != has_loss


@pytest.mark.slow
def test_the_line_of_the_last_step_of_a_run_that_ends_early_has_no_metric_of_an_older_step(tmp_path, capsys):
    settings = "max_steps=4", "trainer.val_check_interval=3", "trainer.log_every_n_steps=2"
    with composed(tmp_path, *tiny(tmp_path, *settings, f"+callbacks.early={EARLY}")) as cfg:
        training.train(cfg)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert "tokens/s" in lines[0] and all(len(line.split()) == 4 for line in lines[1:]), lines


@pytest.mark.slow
def test_runs_in_one_folder_keep_the_metrics_of_earlier_runs(tmp_path, capsys):
    for steps in (1, 2, 3):
        with composed(tmp_path, *tiny(tmp_path, f"max_steps={steps}")) as cfg:
            training.train(cfg)
    files = [tmp_path / name for name in ("metrics-1.csv", "metrics-2.csv", "metrics.csv")]
    losses = [[row["train/loss"] for row in csv.DictReader(file.open()) if row["train/loss"]] for file in files]
    assert [len(column) for column in losses] == [1, 2, 3]
    assert f"the metrics of an earlier run in this folder are now in {files[1]}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("restored", "trained", "error", "shown"),
    [
        pytest.param(0, 2, ValueError("x"), True, id="after-a-step"),
        pytest.param(0, 0, ValueError("x"), False, id="before-a-step"),
        pytest.param(3, None, ValueError("x"), False, id="the-checkpoint-does-not-fit"),
        pytest.param(3, 1, ValueError("x"), True, id="after-a-resumed-step"),
        pytest.param(0, 2, TrainedWeightsError("x"), False, id="weights-were-frozen"),
        pytest.param(0, 2, OSError(28, "x"), True, id="full-disk"),
        pytest.param(0, 2, OSError(2, "x"), False, id="python-prints-the-traceback"),
        pytest.param(0, 2, MisconfigurationException("x"), True, id="lightnings-mistake"),
    ],
)
def test_a_traceback_is_shown_if_an_error_after_the_first_step_does_not_explain_itself(
    restored, trained, error, shown, capsys
):
    """If `trained` is None, the error comes after the checkpoint's step is restored, but before training starts."""
    record, trainer = Record(), SimpleNamespace(global_step=0, is_global_zero=False, loggers=[])
    record.on_fit_start(trainer, None)
    trainer.global_step = restored
    if trained is not None:
        record.on_train_start(trainer, None)
        trainer.global_step += trained
    record.on_exception(trainer, None, error)
    assert (type(error).__name__ in capsys.readouterr().err) == shown


@pytest.fixture
def uploaded(monkeypatch) -> list[str]:
    """The names of the checkpoints that W&B has uploaded."""
    names: list[str] = []
    log_artifact = wandb.Run.log_artifact

    def spy(run, artifact, **options):
        done = log_artifact(run, artifact, **options)
        if artifact.type == "model":  # charts have artifacts too
            names.append(artifact.metadata["original_filename"])
        return done

    monkeypatch.setattr(wandb.Run, "log_artifact", spy)
    return names


UPLOAD = ("logger=wandb", "logger.mode=offline", "max_steps=2")


@pytest.mark.slow
def test_a_run_uploads_its_last_checkpoint_and_exports_it(uploaded, tmp_path):
    _, folder = run(tmp_path, *UPLOAD, "+logger.log_model=true", "export=true")
    assert uploaded == ["step_0000002.ckpt"] and (folder / "exported/config.json").exists()


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 1:
            raise RuntimeError("the first error")


@pytest.mark.slow
def test_a_failed_run_that_uploads_all_checkpoints_raises_its_first_error(uploaded, tmp_path, capsys):
    fails = f"+callbacks.fails._target_={__name__}.Fails"
    with pytest.raises(RuntimeError, match="the first error"):
        run(tmp_path, *UPLOAD, "+logger.log_model=all", fails)
    assert "step_0000001.ckpt; ckpt_path=" in capsys.readouterr().out and not uploaded
