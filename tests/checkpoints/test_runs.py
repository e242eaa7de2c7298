"""Tests which checkpoints train.py keeps, which it resumes from, and which it refuses."""

import errno
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints

from fa_train import run_config, training
from fa_train.callbacks import checkpoint
from fa_train.callbacks.monitor import Monitor
from fa_train.checkpoints.files import CheckpointError
from fa_train.parallel.sharded_checkpoint import require_whole
from tests.support.marks import slow_except
from tests.support.runs import start_and_finish
from tests.support.training import column, command_line, composed, tiny

TWO_STEPS = ("callbacks.checkpoint.every_n_train_steps=1", "max_steps=2", "trainer.val_check_interval=2")
EACH_STEP = ("callbacks.checkpoint.every_n_train_steps=1", "max_steps=5", "trainer.val_check_interval=5")


def run(folder: Path, tmp_path: Path, *overrides: str) -> list[str]:
    """Trains in this process and returns the names of the checkpoints that are left at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with composed(folder, *tiny(tmp_path, *overrides)) as cfg:
        training.train(cfg)
    return checkpoints(folder)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def one_line(done) -> str:
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if "UserWarning" not in line]
    [error] = [line for line in lines if line.startswith("error: ")]
    assert "Traceback" not in done.stderr and lines[-1] == error and len(lines) <= 2, done.stderr
    return error


def test_the_newest_two_are_kept_by_default(tmp_path):
    """tests/callbacks/test_checkpoint.py sets save_top_k."""
    assert run(tmp_path / "run", tmp_path, *EACH_STEP) == ["step_0000004.ckpt", "step_0000005.ckpt"]


@pytest.mark.slow
def test_a_logger_that_uploads_models_finds_each_checkpoint(tmp_path, monkeypatch):
    seen = []

    def upload(logger, callback) -> None:  # like WandbLogger(log_model="all")
        seen.extend(Path(path).name for _, path, *_ in _scan_checkpoints(callback, {}))

    monkeypatch.setattr(CSVLogger, "after_save_checkpoint", upload)
    run(tmp_path / "run", tmp_path, *TWO_STEPS)
    assert seen == ["step_0000001.ckpt", "step_0000002.ckpt"]


@pytest.mark.slow
def test_the_older_checkpoint_is_removed_when_the_new_one_is_in_place(tmp_path, monkeypatch):
    seen = []

    def spy(path: Path) -> None:
        if not path.name.endswith(".partial"):
            seen.append((path.name, checkpoints(tmp_path / "run")))

    monkeypatch.setattr("fa_train.callbacks.checkpoint.remove", spy)
    run(tmp_path / "run", tmp_path, *EACH_STEP, "max_steps=3", "trainer.val_check_interval=3")
    assert seen == [("step_0000001.ckpt", [f"step_000000{i}.ckpt" for i in (1, 2, 3)])]


class KilledWhileSaving(Callback):
    """Kills the process while the process writes the checkpoint of step 3."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            torch.save = self.die  # type: ignore[assignment]

    def die(self, content, file) -> None:
        file.write(b"PK half of a checkpoint")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_older_checkpoints_whole(tmp_path):
    overrides = tiny(tmp_path, *EACH_STEP, "run_name=killed")
    killed = "+callbacks.killed._target_=tests.checkpoints.test_runs.KilledWhileSaving"
    done = command_line(tmp_path, *overrides, killed, "hydra.run.dir=runs/killed/run")
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "runs/killed/run"
    assert checkpoints(folder) == ["step_0000001.ckpt", "step_0000002.ckpt", "step_0000003.ckpt.partial"]
    for name in checkpoints(folder)[:2]:
        require_whole(folder / "checkpoints" / name)
    rest = start_and_finish(tmp_path, *overrides, "ckpt_path=last")
    assert sorted(column(rest, "train/loss")) == [3, 4, 5]
    done = command_line(tmp_path, *overrides, "ckpt_path=last", "max_steps=6", "hydra.run.dir=runs/killed/run")
    assert done.returncode == 0 and not list(folder.rglob("*.partial")), done.stderr


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_the_older_checkpoints(tmp_path):
    full = ("+callbacks.full._target_=tests.checkpoints.support.callbacks.FullDisk", "+callbacks.full.step=3")
    done = command_line(tmp_path, *tiny(tmp_path, *EACH_STEP, "run_name=full"), *full)
    assert one_line(done).endswith("step_0000003.ckpt could not be written: File too large")
    [folder] = tmp_path.rglob("checkpoints")
    assert checkpoints(folder.parent) == ["step_0000001.ckpt", "step_0000002.ckpt"]
    for name in checkpoints(folder.parent):
        require_whole(folder / name)
    assert "ckpt_path=last resumes from it" in done.stdout


@pytest.mark.slow
def test_a_failed_rename_is_one_line(tmp_path, monkeypatch):
    def rename(partial: Path, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoint, "rename_into_place", rename)
    with (
        composed(tmp_path / "run", *tiny(tmp_path, *EACH_STEP)) as cfg,
        pytest.raises(CheckpointError, match=r"step_0000001.ckpt could not be written: Read-only file system"),
    ):
        training.train(cfg)


def test_a_run_goes_on_if_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "remove", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
    callback = checkpoint.Checkpoint(str(tmp_path), "mine", 1, 1, False, save_on_exception=True, asynchronous=False)
    callback.saved = [tmp_path / "step_0000001.ckpt", tmp_path / "step_0000002.ckpt"]
    trainer = Mock(is_global_zero=True)
    callback._prune(trainer)
    [message] = trainer.print.call_args.args
    assert message.startswith("warning: the old checkpoint") and "step_0000001.ckpt was not removed" in message
    assert callback.saved == [tmp_path / "step_0000002.ckpt"]


def test_checkpoints_of_any_number_of_earlier_runs_are_kept(tmp_path):
    callback = checkpoint.Checkpoint(str(tmp_path), "mine", 1, 1, False, save_on_exception=True, asynchronous=False)
    for _ in range(101):
        callback._free_path(5).touch()
    assert callback._free_path(5).name == "step_0000005-v101.ckpt"


@pytest.mark.slow
def test_a_run_ends_well_if_result_json_cannot_be_written(tmp_path, capsys):
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    with composed(tmp_path / "run", *tiny(tmp_path, *EACH_STEP, "max_steps=2")) as cfg:
        training.train(cfg)
    printed = capsys.readouterr().out
    assert "error: result.json was not written: [Errno 21] Is a directory" in printed
    assert "done: " in printed and "step_0000002.ckpt" in printed


class Fails(Callback):
    """Raises an error in the third step: after the update of the first group of weights, or after the whole update."""

    def __init__(self, whole_update: bool) -> None:
        self.whole_update = whole_update

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 2 and not self.whole_update:
            module = sys.modules["torch.optim.adam"]
            module.adam = Mock(side_effect=[None, RuntimeError("the first error")])  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            Path(trainer.default_root_dir, "result.json").mkdir()  # this folder keeps the run from writing result.json
            raise RuntimeError("the first error")


@pytest.mark.parametrize(
    ("whole_update", "saved"),
    [pytest.param("true", ["step_0000003.ckpt"], id="whole-update"), pytest.param("false", [], id="half-update")],
)
def test_an_error_saves_whole_updates_only(whole_update, saved, tmp_path, monkeypatch):
    module = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(module, "adam", module.adam)  # monkeypatch restores the function after the test
    fails = (
        "+callbacks.fails._target_=tests.checkpoints.test_runs.Fails",
        f"+callbacks.fails.whole_update={whole_update}",
    )
    with pytest.raises(RuntimeError, match="the first error"):
        run(tmp_path / "run", tmp_path, "max_steps=4", *fails)
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == saved


@pytest.mark.parametrize(
    ("folder", "is_last"),
    [
        pytest.param("runs/mine/now", True, id="below-its-runs"),
        pytest.param("runs/multirun/now/0", False, id="sweep"),
    ],
)
def test_a_failed_run_names_the_override_that_resumes(folder, is_last, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails = "+callbacks.fails._target_=tests.checkpoints.test_runs.Fails"
    with pytest.raises(RuntimeError, match="the first error"):
        run(tmp_path / folder, tmp_path, "run_name=mine", "max_steps=4", fails, "+callbacks.fails.whole_update=true")
    path = tmp_path / folder / "checkpoints" / "step_0000003.ckpt"
    override = "ckpt_path=last" if is_last else f"ckpt_path={path}"
    assert f"checkpoint: {path}; {override} resumes from it\n" in capsys.readouterr().out
    run(tmp_path / "again", tmp_path, "run_name=mine", "max_steps=4", override)
    assert re.search(r"resuming from .*step_0000003.ckpt after step 3\n", capsys.readouterr().out)


class Spoil(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 2:
            with torch.no_grad():
                next(pl_module.parameters())[0, 0] = float("nan")


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(tmp_path, capsys):
    spoil = "+callbacks.spoil._target_=tests.checkpoints.test_runs.Spoil"
    with pytest.raises(ValueError, match=r"export=true needs finite weights at the last step; .*step_0000002.ckpt"):
        run(tmp_path / "run", tmp_path, *EACH_STEP, "export=true", spoil)
    assert checkpoints(tmp_path / "run") == ["step_0000001.ckpt", "step_0000002.ckpt"]
    assert not (tmp_path / "run" / "exported").exists()
    assert capsys.readouterr().out.count(": the weights contain NaN or infinity") == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Returns a folder with a run of two steps, its checkpoints and its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder / "runs" / "first", folder, *TWO_STEPS)
    return folder


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line(trained, tmp_path):
    """test_files.py tests other kinds of damage."""
    path = tmp_path / "damaged.ckpt"
    data = bytearray((trained / "runs/first/checkpoints/step_0000002.ckpt").read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    done = command_line(tmp_path, *tiny(tmp_path, *TWO_STEPS, "max_steps=3", f"ckpt_path={path}"))
    assert one_line(done).startswith(f"error: {path} is damaged or is not a checkpoint of train.py: ")


@pytest.mark.parametrize(
    ("override", "difference"),
    slow_except(
        ["more-layers"],
        [
            pytest.param(
                "model.dim=64", r"attention.out.weight must have the shape \(64, 64\); got \(32, 32\)", id="shape"
            ),
            pytest.param("model.n_layers=3", "the checkpoint has no model.blocks.2", id="more-layers"),
            pytest.param("model.n_layers=1", "the model has no model.blocks.1", id="fewer-layers"),
            pytest.param("adapter=lora", r"the checkpoint has no model.blocks.0.\S*lora_A", id="adapters"),
        ],
    ),
)
def test_a_checkpoint_of_another_model_is_one_line(override, difference, trained, tmp_path):
    start = f"ckpt_path={trained}/runs/first/checkpoints/step_0000002.ckpt"
    # after the checkpoint of step 2, a run of 2 steps has no step left
    steps = "max_steps=2" if override == "model.n_layers=3" else "max_steps=3"
    with pytest.raises(ValueError, match=rf"^\S+step_0000002.ckpt does not fit the model: .*{difference}") as caught:
        run(tmp_path / "run", trained, *TWO_STEPS, steps, start, override)
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.ckpt*")), "no half-restored state is saved"


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        pytest.param([], [], id="same"),
        pytest.param(["model.head_dim=8", "model.init=llama"], [], id="same-computation", marks=pytest.mark.slow),
        pytest.param(
            ["model.rope_theta=100", "model.activation=geglu"],
            ["model.activation=swiglu; this run has geglu", "model.rope_theta=10000.0; this run has 100"],
            id="other-computation",
        ),
    ],
)
def test_another_architecture_with_the_same_shapes_is_said(overrides, changed, trained, tmp_path, capsys):
    start = f"ckpt_path={trained}/runs/first/checkpoints/step_0000002.ckpt"
    run(tmp_path / "run", trained, *TWO_STEPS, "max_steps=3", start, *overrides)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: the checkpoint was written with {text}" for text in changed]


def test_another_scale_of_an_adapter_is_said(trained, tmp_path, capsys):
    """Another lora_dropout causes no warning, because dropout acts only during training."""
    run(tmp_path / "run", trained, "adapter=lora", "max_steps=1")
    start = f"ckpt_path={tmp_path}/run/checkpoints/step_0000001.ckpt"
    changed = ("adapter.lora_alpha=8", "adapter.use_rslora=true", "adapter.lora_dropout=0.1")
    capsys.readouterr()
    run(tmp_path / "again", trained, "adapter=lora", "max_steps=2", start, *changed)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("warning: the checkpoint")] == [
        "warning: the checkpoint was written with adapter.lora_alpha=32; this run has 8",
        "warning: the checkpoint was written with adapter.use_rslora=false; this run has true",
    ]


def test_another_batch_size_is_said_and_tokens_are_counted(trained, tmp_path, capsys):
    """Steps 1 and 2 have 4 rows of 64 tokens each, step 3 has 8 rows, and step 4 has 2 rows."""
    start = f"{trained}/runs/first/checkpoints/step_0000002.ckpt"
    tokens = 2 * 4 * 64
    for step, size, effect in (
        (3, 8, "16 (step * batch_size) instead of row 8, so 8 rows are skipped"),
        (4, 2, "6 (step * batch_size) instead of row 24, so 18 rows are repeated"),
    ):
        capsys.readouterr()
        same_lr = "scheduler.min_lr_ratio=1"
        run(tmp_path / str(size), trained, f"ckpt_path={start}", f"batch_size={size}", f"max_steps={step}", same_lr)
        printed = capsys.readouterr().out.splitlines()
        assert printed.count(f"resuming from {start} after step {step - 1}") == 1
        assert f"no validation: max_steps={step} is below trainer.val_check_interval=10" in printed
        [warning] = [line for line in printed if line.startswith("warning: ")]
        assert f"this run has {size}. The data continue at row {effect}" in warning
        tokens += size * 64
        assert column(tmp_path / str(size), "tokens") == {step: tokens}
        assert json.loads((tmp_path / str(size) / "result.json").read_text())["tokens"] == tokens
        start = f"{tmp_path}/{size}/checkpoints/step_000000{step}.ckpt"


def test_changed_rows_are_said(trained, tmp_path, capsys):
    start = f"ckpt_path={trained}/runs/first/checkpoints/step_0000002.ckpt"
    rest = ". The rows differ, so documents may be repeated or left out"
    for number, (changes, lines) in enumerate(
        (
            (["seed=7", "seq_len=32"], ["data.seed=0; this run has 7", "data.seq_len=64; this run has 32"]),
            (["data=synthetic", "data.vocab_size=259"], [r"data.rows_per_epoch=\d+; this run has \d+"]),
            ([], []),
        )
    ):
        capsys.readouterr()
        run(tmp_path / str(number), trained, start, "max_steps=3", *changes)
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == len(lines)
        for warning, line in zip(warnings, lines, strict=True):
            assert re.fullmatch(f"warning: the checkpoint was written with {line}{rest}", warning), warning


def test_another_learning_rate_is_said(trained, tmp_path, capsys):
    start = f"ckpt_path={trained}/runs/first/checkpoints/step_0000001.ckpt"
    for number, (change, line) in enumerate(
        (
            ("max_steps=2", None),  # the same settings as in the checkpoint's run
            ("optimizer.lr=3.02e-3", None),
            ("optimizer.lr=1e-2", "the learning rate continues at 0.01; the checkpoint's was 0.003"),
            ("scheduler.warmup_steps=20", "the learning rate continues at 0.0003; the checkpoint's was 0.003"),
        )
    ):
        capsys.readouterr()
        run(tmp_path / str(number), trained, *TWO_STEPS, start, change)
        start_of_line = "warning: the learning rate continues"
        warnings = [text for text in capsys.readouterr().out.splitlines() if text.startswith(start_of_line)]
        schedule = ". The schedule follows this run's settings, such as max_steps and optimizer.lr"
        assert warnings == ([] if line is None else [f"warning: {line}{schedule}"])


def test_the_last_step_is_saved_although_an_earlier_save_failed(tmp_path, monkeypatch):
    callback = checkpoint.Checkpoint(str(tmp_path), "mine", 1, 1, False, save_on_exception=True, asynchronous=True)
    monkeypatch.setattr(callback, "_end_background", Mock(side_effect=CheckpointError("the disk was full")))
    monkeypatch.setattr(callback, "_save", Mock())
    with pytest.raises(CheckpointError, match="the disk was full"):
        callback.on_train_end(Mock(), Mock())
    assert callback._save.call_count == 1


def test_a_checkpoint_without_a_count_of_tokens_is_counted_by_steps():
    monitor, trainer = Monitor(seq_len=64, batch_size=4, max_skipped_steps=None), Mock()
    monitor.on_load_checkpoint(trainer, Mock(), {"global_step": 3})
    assert monitor.tokens_by(5) == 5 * 4 * 64 and not trainer.print.called


@pytest.mark.parametrize(
    ("done", "max_steps", "message"),
    [
        (0, 100, None),
        (100, 200, None),
        (0, 99, "no validation: max_steps=99 is below trainer.val_check_interval=100"),
        (
            100, 150,
            "no validation: none of the steps 101 to 150 is a multiple of trainer.val_check_interval=100",
        ),
    ],
)  # fmt: skip
def test_a_run_without_validation_says_so(done, max_steps, message):
    assert training.without_validation(done, max_steps, 100, val_rows=1, limit_val_batches=1.0) == message


@pytest.mark.parametrize("override", ["data.val_rows=0", "+trainer.limit_val_batches=0"])
def test_a_run_that_may_use_no_rows_for_a_validation_says_so(override, tmp_path, capsys):
    message = f"no validation: {override.removeprefix('+').removesuffix('=0')} is 0"
    run(tmp_path / "run", tmp_path, *TWO_STEPS, override, "callbacks.checkpoint.keep_best=true")
    assert f"{message}. keep_best has no effect\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"^optimized_metric=val/loss needs a validation; {message}$"):
        run(tmp_path / "refused", tmp_path, *TWO_STEPS, override, "optimized_metric=val/loss")
    assert not list((tmp_path / "refused").rglob("checkpoints"))


def test_a_metric_of_the_validation_needs_data_that_can_be_held_out(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a")
    with composed(tmp_path, *tiny(tmp_path, *TWO_STEPS, "optimized_metric=val/loss")) as cfg:
        cfg.data.path = str(text)
        with pytest.raises(ValueError, match="needs a validation; no validation: the data have too few tokens"):
            training.train(cfg)


def test_a_head_of_its_own_is_not_dropped(trained, tmp_path):
    start = f"ckpt_path={trained}/runs/first/checkpoints/step_0000002.ckpt"
    with pytest.raises(
        ValueError, match=r"was written with model.tied=true; this run has false\. Use the setting of the checkpoint"
    ):
        run(tmp_path / "run", trained, *TWO_STEPS, "max_steps=3", start, "model.tied=false")


@pytest.mark.slow
def test_last_skips_a_damaged_checkpoint_and_says_so(trained, tmp_path):
    folder = tmp_path / "runs/cut/earlier/checkpoints"
    shutil.copytree(trained / "runs/first/checkpoints", folder)
    os.truncate(folder / "step_0000002.ckpt", 1000)
    done = command_line(tmp_path, *tiny(tmp_path, *TWO_STEPS, "max_steps=3", "run_name=cut", "ckpt_path=last"))
    assert done.returncode == 0, done.stderr
    assert "ckpt_path=last skips a checkpoint: " in done.stdout and "step_0000002.ckpt is damaged" in done.stdout
    [metrics] = tmp_path.rglob("metrics.csv")
    assert sorted(column(metrics.parent, "train/loss")) == [2, 3]
    for misleading in ("You're resuming from a checkpoint", "Previous log files"):
        assert misleading not in done.stderr
    assert not done.stderr.strip(), "resuming must not print a warning"


@pytest.mark.slow
def test_a_finished_run_says_so_and_changes_nothing(trained, tmp_path):
    start = trained / "runs/first/checkpoints/step_0000002.ckpt"
    before = {path: path.stat().st_mtime_ns for path in (trained / "runs").rglob("*")}
    done = command_line(tmp_path, *tiny(trained, *TWO_STEPS, f"ckpt_path={start}"))
    assert done.returncode == 0, done.stderr
    assert f"nothing to do: {start} has done 2 of max_steps=2 steps" in done.stdout.splitlines()[-1]
    assert before == {path: path.stat().st_mtime_ns for path in (trained / "runs").rglob("*")}
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_finished_run_can_still_be_exported(trained, tmp_path, capsys):
    start = trained / "runs/first/checkpoints/step_0000002.ckpt"
    folder = tmp_path / "again"
    folder.mkdir()
    with composed(folder, *tiny(trained, *TWO_STEPS, f"ckpt_path={start}", "export=true")) as cfg:
        training.train(cfg)
    exported = folder / "exported"
    assert capsys.readouterr().out.splitlines()[-1] == f"exported: {exported}"
    assert (exported / "model.safetensors").exists()
    card = (exported / "README.md").read_text()
    assert "| Optimizer steps | 2 |" in card and "| Training loss, nats per token |" in card


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("save_top_k=0", "save_top_k must be a positive integer or -1; got 0"),
        ("every_n_train_steps=0", "every_n_train_steps must be a positive integer; got 0"),
        ("keep_best=val/loss", "keep_best must be true or false; got val/loss"),
    ],
)
def test_impossible_settings_are_named(override, message, tmp_path):
    with (
        composed(tmp_path, *tiny(tmp_path, f"callbacks.checkpoint.{override}")) as cfg,
        pytest.raises(Exception, match=message),
    ):
        run_config.check(cfg)
