"""Tests scripts/bench/planner.py on a CPU: the steps of each configuration, and the files."""

import gc
import json
import sys

import pytest

from fa_train.callbacks.monitor import GIB
from fa_train.lit_gpt import LitGPT
from fa_train.memory.memory import Levers
from fa_train.memory.planner.predict import predict
from fa_train.models.gpt import GPT
from scripts.bench import planner
from scripts.bench.planner import RUNS, Run, configuration, measure
from tests.memory.support.plans import recorded


@pytest.mark.slow
def test_two_configurations_in_one_process(tmp_path, monkeypatch, updates):
    """Each configuration trains for two steps of `micro_batches` micro-batches, and then frees its weights."""
    batches = []
    step = LitGPT.training_step
    monkeypatch.setattr(LitGPT, "training_step", lambda *given: batches.append(len(given[1]["tokens"])) or step(*given))
    short = Run("nano", 128, precision="32-true", micro_batches=3)
    long = Run("nano", 256, "full", offload=True, mlp_chunk=64, precision="32-true")
    runs = [short, long]
    measured = {run: measure(run, "cpu") for run in runs}
    assert batches == [128] * 6 + [256] * 2 and updates == ["AdamW"] * 4
    gc.collect()
    models = [found for found in gc.get_objects() if isinstance(found, GPT)]
    assert not any(parameter.device.type == "cpu" and parameter.numel() for x in models for parameter in x.parameters())

    monkeypatch.setattr(planner, "RUNS", runs)
    monkeypatch.setattr(planner, "measure", lambda run, device: measured[run])
    monkeypatch.setattr(planner, "describe", lambda *given: {"GPU": "none"})
    monkeypatch.setattr(planner, "require_gpu", lambda script: None)
    monkeypatch.setattr(sys, "argv", ["planner", "--out", str(tmp_path / "found")])
    planner.main()
    rows = json.loads((tmp_path / "found.json").read_text())
    for row, (plan, peak, seconds) in zip(rows, measured.values(), strict=True):
        assert recorded(row["plan"]) == plan and row["peak_gib"] == round(peak, 3) and seconds > 0
        assert row["predicted_gib"] == round(predict(plan).allocated / GIB, 3)
    first, second = measured[short][0], measured[long][0]
    assert first.run.accumulates and not second.run.accumulates
    assert second.levers == Levers("full", True, 64) and second.run.seq_len == 256
    text = (tmp_path / "found.md").read_text()
    assert "of 2 within 5%" in text and "| nano | 256 | full | yes | 64 | 32-true | adamw |  | 1 |" in text


@pytest.mark.slow
def test_a_run_has_its_settings():
    for run in [run for run in RUNS if run.optimizer != "adamw" or run.compiled][-5:]:
        config = configuration(run, "cuda")
        assert (config.trainer.precision, config.lit_gpt.compile_model) == (run.precision, run.compiled)
        assert config.optimizer._target_ == f"fa_train.optim.adamw.{run.optimizer}"
        assert (config.batch_size, config.data.micro_batch_size) == (run.micro_batches, 1)
        assert (config.choices.attention, config.max_steps, config.seq_len) == ("flash", 2, run.tokens)
        levers = config.model.memory
        assert (levers.checkpointing, levers.offload, levers.mlp_chunk) == (
            run.checkpointing,
            run.offload,
            run.mlp_chunk,
        )
