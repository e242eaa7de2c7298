"""Tests complete runs of train.py with tiny models."""

import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import NoneType

import pytest
import torch
import triton
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from fa_train import training
from tests.support import processes
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.runs import run, start_and_finish, start_and_stop
from tests.support.training import RECORDED, column, command_line, composed, quiet_environment, recorded_rows, tiny
from train import optimized, set_environment


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("flash", marks=pytest.mark.gpu)])
def test_loss_falls_in_twenty_steps(attention, tmp_path, device):
    result, folder = run(tmp_path, f"attention={attention}", f"trainer.accelerator={device.type}")
    losses = column(folder, "train/loss")
    assert sorted(losses) == list(range(1, 21))
    assert losses[1] == pytest.approx(5.56, abs=0.3), "uniform over 259 tokens"
    assert losses[20] < losses[1] - 1
    assert result["val/loss"] < losses[1] - 1 and "oom" not in result
    assert result == json.loads((folder / "result.json").read_text())
    assert result["tokens"] == 20 * 4 * 64 and result["perf/peak_gib"] > 0


def test_a_scheduler_of_torch_replaces_the_schedule_of_conf(tmp_path):
    removed = [f"~scheduler.{key}" for key in ("warmup_steps", "max_steps", "min_lr_ratio")]
    own = ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=1", "+scheduler.gamma=0.5"]
    settings = tiny(tmp_path, "max_steps=4", "optimizer.lr=0.4", "trainer.val_check_interval=1")
    with composed(tmp_path / "run", *settings, *removed, *own) as cfg:
        training.train(cfg)
    assert list(column(tmp_path / "run", "lr").values()) == pytest.approx([0.4, 0.2, 0.1, 0.05])


def test_a_sweeper_gets_the_metric_that_it_optimizes():
    assert optimized({"val/loss": 2.5, "tokens": 8.0}, "val/loss") == 2.5
    assert math.isnan(optimized({"oom": 1.0}, "val/loss"))
    assert math.isnan(optimized({}, "val/loss")), "the run had nothing to do"
    for metric, other in (("val/loss", "val/step"), ("train/loss", "lr"), ("train/grad_norm", "lr")):
        assert math.isnan(optimized({"tokens": 8.0, other: 1.0}, metric)), "result.json omits NaN"
    message = "optimized_metric must be a metric of this run: tokens, train/loss; got val/loss"
    with pytest.raises(ValueError, match=message):
        optimized({"train/loss": 2.5, "tokens": 8.0}, "val/loss")


def test_an_optimizer_gets_lists_of_python(tmp_path):
    """A checkpoint cannot be read if the optimizer's settings in it are lists of OmegaConf."""
    with composed(tmp_path / "run", *tiny(tmp_path)) as cfg:
        _, lit_gpt, _ = training.build(cfg)
    assert type(lit_gpt.optimizer.keywords["betas"]) is list


def test_another_data_module_is_refused(tmp_path):
    with composed(tmp_path, "preset=cpu") as cfg:
        cfg.data, cfg.callbacks = {"_target_": "lightning.pytorch.demos.boring_classes.BoringDataModule"}, {}
        with pytest.raises(ValueError, match="data must be a PackedDataModule; got a BoringDataModule"):
            training.build(cfg)


@pytest.mark.parametrize("enabled", [[], ["+trainer.enable_checkpointing=true"]], ids=["default", "lightnings"])
def test_a_run_without_checkpoint_callback_saves_no_checkpoints(enabled, tmp_path):
    with composed(tmp_path / "run", *tiny(tmp_path, "callbacks.checkpoint=null", *enabled)) as cfg:
        trainer, _, _ = training.build(cfg)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint if enabled else NoneType)


@pytest.mark.parametrize("enabled", [[], ["+trainer.enable_progress_bar=true"]], ids=["default", "lightnings"])
def test_a_run_without_progress_callback_shows_no_bar(enabled, tmp_path):
    """Lightning's bar would show 16/8 after 8 steps of 2 micro-batches."""
    with composed(tmp_path / "run", *tiny(tmp_path, "callbacks.progress=null", *enabled)) as cfg:
        trainer, _, _ = training.build(cfg)
    assert (trainer.progress_bar_callback is not None) == bool(enabled)


def test_a_callback_gets_a_dict_of_python(tmp_path):
    timer = ["+callbacks.mine._target_=lightning.pytorch.callbacks.Timer", "+callbacks.mine.duration={minutes: 2}"]
    with composed(tmp_path / "run", *tiny(tmp_path), *timer) as cfg:
        trainer, _, _ = training.build(cfg)
    [callback] = (x for x in trainer.callbacks if isinstance(x, Timer))
    assert callback.time_remaining() == 120


def test_lightnings_model_summary_is_printed(tmp_path, caplog):
    summary = "+callbacks.mine._target_=lightning.pytorch.callbacks.ModelSummary"
    with composed(tmp_path / "run", *tiny(tmp_path, "max_steps=1"), summary) as cfg:
        training.train(cfg)
    assert "Trainable params" in caplog.text


@pytest.mark.parametrize("given", [{}, {"TRITON_HOME": "/home"}, {"TRITON_CACHE_DIR": "/cache"}], ids=str)
def test_kernels_stay_in_the_folder_that_triton_chooses(given, monkeypatch):
    for name in ("HYDRA_FULL_ERROR", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variables that set_environment sets
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    folder = triton.knobs.cache.dir
    set_environment()
    assert os.environ["TRITON_CACHE_DIR"] == triton.knobs.cache.dir == folder


@pytest.mark.slow
def test_micro_batches_change_nothing_but_memory(tmp_path):
    runs = (run(tmp_path, "max_steps=5", f"data.micro_batch_size={size}")[1] for size in (1, 4))
    small, large = (list(column(folder, "train/loss").values()) for folder in runs)
    # rows have different numbers of labels, so the mean of the micro-batches' mean losses would be wrong
    torch.testing.assert_close(small, large, rtol=1e-4, atol=0)


@pytest.mark.slow
def test_validation_does_not_depend_on_micro_batches(tmp_path):
    """Rows without labels, which fill up a micro-batch, do not change val/loss."""
    settings = ["max_steps=2", "batch_size=8", "data.val_rows=3", "trainer.val_check_interval=1"]
    one, *others = (
        column(run(tmp_path, *settings, f"data.micro_batch_size={size}")[1], "val/loss") for size in (1, 2, 8)
    )
    assert sorted(one) == [1, 2]
    for other in others:
        assert other == pytest.approx(one, rel=1e-5), "fp32 sums in another order"


def test_labels_are_counted_exactly_with_bf16_weights(tmp_path):
    """With bf16 weights, Lightning converts float buffers to bf16, which cannot represent most counts above 256."""
    with composed(tmp_path, *tiny(tmp_path, "trainer.precision=bf16-true")) as cfg:
        trainer, lit_gpt, _ = training.build(cfg)
    trainer.precision_plugin.convert_module(lit_gpt)
    lit_gpt.on_fit_start()
    assert next(lit_gpt.parameters()).dtype == torch.bfloat16
    assert lit_gpt._sums.dtype == lit_gpt._val_sums.dtype == torch.float64


def test_out_of_memory_is_a_result(tmp_path, monkeypatch, capsys):
    def naive(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("fa_train.models.attention.naive_attention", naive)
    result, folder = run(tmp_path, "attention=naive", "data.micro_batch_size=2")
    assert result["oom"] == 1 and column(folder, "oom") == {0: 1.0}
    message = capsys.readouterr().err
    for part in ("seq_len=64", "attention=naive", "attention=flash", "data.micro_batch_size=1"):
        assert part in message


@pytest.mark.parametrize(
    ("settings", "exports"),
    [
        pytest.param(["model.positions=none"], False, id="no-positions"),
        pytest.param(["model.norm=layernorm"], False, id="layernorm"),
        pytest.param([], True, id="llama"),
        pytest.param(["adapter=lora"], True, id="adapter", marks=pytest.mark.slow),
    ],
)
def test_an_export_that_would_fail_is_refused_before_training(settings, exports, tmp_path, monkeypatch):
    def fit(trainer, *args):
        raise InterruptedError("training starts")

    monkeypatch.setattr(training, "fit", fit)
    error = InterruptedError if exports else ValueError
    with pytest.raises(error, match="^training starts" if exports else "^an export needs the architecture of llama"):
        run(tmp_path, "export=true", *settings)
    if not exports:
        with pytest.raises(InterruptedError):
            run(tmp_path, *settings)


@pytest.mark.gpu
def test_sigusr1_saves_on_a_gpu(tmp_path):
    """LLVM replaces the handler of SIGUSR1 when Triton compiles the first kernel in the process of the run."""
    settings = ("trainer.accelerator=gpu", "attention=flash", "data=synthetic", "max_steps=20000")
    folder = start_and_stop(tmp_path, tiny(tmp_path, *settings), 3, signal.SIGUSR1)
    assert len(list(folder.glob("checkpoints/*.ckpt"))) == 1


@pytest.mark.slow
def test_a_run_killed_twice_has_the_rows_and_losses_of_one(tmp_path):
    """A resumed run repeats the steps after the newest checkpoint."""
    settings = ["data.packing=best_fit", "data.num_workers=1", "callbacks.checkpoint.every_n_train_steps=3"]
    overrides = [*tiny(tmp_path, *settings, "run_name=killed", "max_steps=16"), *RECORDED]
    _, folder = run(tmp_path, *settings, "max_steps=16", *RECORDED)
    losses, rows = column(folder, "train/loss"), recorded_rows(folder)
    assert sorted(losses) == list(range(1, 17)) and sorted(rows) == list(range(16))
    assert len({row for hashes in rows.values() for row in hashes}) > 30, "rows differ"
    parts = [start_and_stop(tmp_path, overrides, 5, signal.SIGKILL)]
    overrides.append("ckpt_path=last")
    parts.append(start_and_stop(tmp_path, overrides, 11, signal.SIGKILL))
    parts.append(start_and_finish(tmp_path, *overrides))
    covered = set()
    for part in parts:
        seen, seen_rows = column(part, "train/loss"), recorded_rows(part)
        assert seen.items() <= losses.items()
        last = max(seen_rows)  # the last step can lack some micro-batches
        assert all(seen_rows[step] == rows[step] for step in seen_rows if step != last)
        assert set(seen_rows[last]) <= set(rows[last])
        assert min(seen) % 3 == 1 and min(seen_rows) == min(seen) - 1, "the run starts at a checkpoint"
        covered |= seen.keys()
    assert covered == losses.keys()
    assert 4 <= min(column(parts[1], "train/loss")) < min(column(parts[2], "train/loss")), (
        "each run continues from a later step"
    )


def start_and_finish_ranks(folder, tmp_path, *overrides):
    """Runs train.py with two ranks. The ranks are forked from a server that has already imported the modules, because
    imports take seconds.
    """
    processes.start_server()  # start one server now, because otherwise each of the two threads would start a server
    arguments = [*overrides, "strategy=ddp", "trainer.devices=2", f"hydra.run.dir={folder}"]
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(command_line, tmp_path, *arguments, **environment) for environment in ranks_of_torchrun(2)]
    for done in (rank.result() for rank in ranks):
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@needs_ports
def test_the_number_of_processes_may_change(tmp_path):
    """Each of the two resumed runs has the same rows and losses as the first run.

    The three validation rows cannot be shared evenly by two processes.
    """
    settings = [
        "max_steps=9", "data.packing=best_fit", "trainer.accelerator=cpu", "callbacks.checkpoint.every_n_train_steps=1",
        "callbacks.checkpoint.save_top_k=-1", "data.val_rows=3", "trainer.val_check_interval=3",
    ]  # fmt: skip
    _, one = run(tmp_path, *settings, *RECORDED)
    losses, rows, validated = column(one, "train/loss"), recorded_rows(one), column(one, "val/loss")
    overrides = tiny(tmp_path, *settings, f"ckpt_path={one}/checkpoints/step_0000003.ckpt")
    two = start_and_finish_ranks(tmp_path / "two", tmp_path, *overrides, *RECORDED)
    _, again = run(tmp_path, *settings, f"ckpt_path={two}/checkpoints/step_0000005.ckpt", *RECORDED, name="again")
    assert len(list(two.glob("rows_*.jsonl"))) == 2, "both ranks had rows"
    for part, first in ((two, 4), (again, 6)):
        seen = column(part, "train/loss")
        assert sorted(seen) == list(range(first, 10))
        assert recorded_rows(part) == {step: rows[step] for step in range(first - 1, 9)}
        assert column(part, "val/loss") == pytest.approx({6: validated[6], 9: validated[9]}, rel=1e-5)
        # two processes add the fp32 values of losses and gradients in another order than one process
        assert list(seen.values()) == pytest.approx([losses[step] for step in seen], rel=1e-5)


@pytest.mark.slow
def test_wandb_is_offline_without_a_key_and_holds_the_run(tmp_path):
    overrides = tiny(tmp_path, "logger=wandb", "max_steps=4", "trainer.val_check_interval=2")
    overrides.append("+trainer.profiler=simple")
    environment = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    chosen = {"WANDB_ENTITY": "somebody", "WANDB_RUN_ID": "earlier", "WANDB_RESUME": "allow"}
    done = command_line(tmp_path, *overrides, **environment, **chosen)
    assert done.returncode == 0, done.stderr
    assert "no API key, so this run is logged offline" in done.stdout
    assert "FIT Profiler Report" in done.stdout + done.stderr
    [record] = tmp_path.rglob("*.wandb")
    arguments = ["leet", "inspect", "--json", str(record)]
    inspected = processes.finish("wandb", arguments, tmp_path, quiet_environment() | environment)
    assert inspected.returncode == 0, inspected.stderr
    text = inspected.stdout
    for name in (
        "train/loss",
        "val/loss",
        "lr",
        "train/grad_norm",
        "perf/tokens_per_s",
        "perf/peak_gib",
        "warmup_steps",
        "packing/efficiency",
        '"entity":"somebody"',
        '"run_id":"earlier"',
    ):
        assert name in text, name
    assert '"panel_type":"Vega2"' in text.replace(" ", "").replace("\\", "") and "wandb/bar/v0" in text
    [table] = tmp_path.rglob("document_lengths*.table.json")
    bars = json.loads(table.read_text())
    assert bars["columns"] == ["tokens", "documents"] and sum(count for _, count in bars["data"]) == 40


def test_a_run_shorter_than_the_logging_interval_prints_no_warning(tmp_path):
    done = command_line(tmp_path, *tiny(tmp_path, "max_steps=2", "trainer.log_every_n_steps=10"))
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
