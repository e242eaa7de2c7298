"""Whole runs of train.py on tiny models."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import train
from tests.training import REPOSITORY, column, command_line, composed, quiet_environment, tiny


def run(tmp_path, *overrides):
    """The results of a run in this process, and its folder."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with composed(folder, *tiny(tmp_path, *overrides)) as cfg:
        return train.train(cfg), folder


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


def test_micro_batches_change_nothing_but_memory(tmp_path):
    losses = [
        list(column(run(tmp_path, f"data.micro_batch_size={size}")[1], "train/loss").values()) for size in (1, 2, 4)
    ]
    # rows differ in their labels: a mean of means would be off in the first step
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-4, atol=0)


def test_labels_are_counted_exactly_with_bf16_weights(tmp_path):
    """Lightning turns every floating-point buffer into bf16, which would count 300 labels as 300 or 302."""
    with composed(tmp_path, *tiny(tmp_path, "trainer.precision=bf16-true")) as cfg:
        trainer, lit_gpt, _ = train.build(cfg)
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


def test_a_sweep_goes_on_after_running_out_of_memory(tmp_path):
    sweep = ["attention=naive", "seq_len=131072,64", "max_steps=2", "batch_size=1", "data.val_rows=1"]
    done = command_line(tmp_path, "-m", *tiny(tmp_path, *sweep), limit_memory=True)  # 274 GB of scores
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.rglob("result.json")))
    assert first["oom"] == 1 and "oom" not in second and second["tokens"] == 128


def test_a_killed_run_resumes_with_the_same_losses(tmp_path):
    """SIGTERM in mid-run saves; ckpt_path=last goes on with the same data and gives the very same losses."""
    _, folder = run(tmp_path)
    whole = column(folder, "train/loss")
    overrides = tiny(tmp_path, "run_name=cut")
    command = [sys.executable, str(REPOSITORY / "train.py"), *overrides]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=quiet_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 7/"):
            process.terminate()
    assert process.wait(timeout=60) == 128 + 15, "".join(lines)
    cut = column(tmp_path / "runs" / "cut", "train/loss")
    assert len(cut) < 20, "it ended before the signal came"
    before = set(tmp_path.rglob("metrics.csv"))
    done = command_line(tmp_path, *overrides, "ckpt_path=last")
    assert done.returncode == 0, done.stderr
    [resumed] = set(tmp_path.rglob("metrics.csv")) - before
    rest = column(resumed.parent, "train/loss")
    assert min(rest) == max(cut) + 1 and max(rest) == 20
    assert cut | rest == whole


def test_wandb_is_offline_without_a_key_and_holds_the_run(tmp_path):
    overrides = tiny(tmp_path, "logger=wandb", "max_steps=4", "trainer.val_check_interval=2")
    environment = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    done = command_line(tmp_path, *overrides, **environment)
    assert done.returncode == 0, done.stderr
    assert "no API key, so this run is logged offline" in done.stdout
    [record] = tmp_path.rglob("*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)]
    inspected = subprocess.run(
        inspect, capture_output=True, text=True, timeout=60
    )  # fmt: skip
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
    ):
        assert name in text, name
