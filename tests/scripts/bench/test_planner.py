"""Tests scripts/bench/planner.py on a CPU: the steps of each configuration, and the files."""

import gc
import json
import re
import sys

import pytest

from fa_train.callbacks.monitor import GIB
from fa_train.lit_gpt import LitGPT
from fa_train.memory.memory import Levers
from fa_train.memory.planner.predict import predict
from fa_train.models.gpt import GPT
from scripts.bench import planner
from scripts.bench.planner import RUNS, Configuration, measure, planned
from tests.memory.support.plans import recorded

TINY = ("model.n_layers=2", "model.vocab_size=64", "trainer.precision=32-true", "lit_gpt.compile_model=false")
SHORT = Configuration("nano", 32, (*TINY, "batch_size=2"))
LONG = Configuration("nano", 64, (*TINY, "memory=offload", "memory.mlp_chunk=16"))


def run_main(monkeypatch, out, *arguments):
    """Runs the script as on a GPU, and returns its rows and its table."""
    monkeypatch.setattr(planner, "planned", lambda configuration, device: planned(configuration, "cpu"))
    monkeypatch.setattr(planner, "measure", lambda config, device: measure(config, "cpu"))
    monkeypatch.setattr(planner, "describe", lambda *given: {"GPU": "none"})
    monkeypatch.setattr(planner, "require_gpu", lambda script: None)
    monkeypatch.setattr(sys, "argv", ["planner", "--out", str(out), *arguments])
    planner.main()
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_two_configurations_in_one_process(tmp_path, monkeypatch, updates):
    """Each configuration trains for two steps, and then frees its weights."""
    batches = []
    step = LitGPT.training_step
    monkeypatch.setattr(LitGPT, "training_step", lambda *given: batches.append(len(given[1]["tokens"])) or step(*given))
    monkeypatch.setattr(planner, "RUNS", [SHORT, LONG])
    rows, text = run_main(monkeypatch, tmp_path / "found")
    assert batches == [32] * 4 + [64] * 2 and updates == ["AdamW"] * 4
    gc.collect()
    models = [found for found in gc.get_objects() if isinstance(found, GPT)]
    assert not any(parameter.device.type == "cpu" and parameter.numel() for x in models for parameter in x.parameters())

    plans = [recorded(row["plan"]) for row in rows]
    assert plans == [planned(configuration, "cpu")[1] for configuration in (SHORT, LONG)]
    assert [row["predicted_gib"] for row in rows] == [round(predict(plan).allocated / GIB, 3) for plan in plans]
    assert all(row["peak_gib"] > 0 and row["step_s"] > 0 for row in rows)
    assert plans[0].run.accumulates and not plans[1].run.accumulates
    assert plans[1].levers == Levers("selective", True, 16) and plans[1].run.seq_len == 64
    assert "of 2 within 5%" in text and f"| `{LONG.text}` |" in text


@pytest.mark.slow
def test_random_configurations_are_refused_skipped_or_measured(tmp_path, monkeypatch, capsys):
    windows = "model.family={_target_: fa_train.models.config.Family, windows: [null, 8]}"
    changes = {7: "model.dim=33", 8: "model.dim=65536", 9: windows, 10: "memory.offload=true"}
    monkeypatch.setattr(planner, "LARGEST_HOST", 0.0)
    monkeypatch.setattr(planner, "random_configuration", lambda n: Configuration("nano", 32, (*TINY, changes[n])))
    rows, _ = run_main(monkeypatch, tmp_path / "found", "--random", "4", "--first", "7")
    assert [row["number"] for row in rows] == [9] and rows[0]["plan"]["model"]["family"]["windows"] == [None, 8]
    printed = capsys.readouterr().out
    assert "7: refused, model.dim must be" in printed and "8: skipped, " in printed and "9: 0." in printed
    assert re.search(r"^10: skipped, 0\.1 GiB on the GPU and 0\.0 GiB on the host$", printed, re.MULTILINE)


def test_nothing_measured_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: no configuration was measured$"):
        run_main(monkeypatch, tmp_path / "found", "--only", "compiled=True")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--first", "5"], "--first needs --random; got --first 5 alone"),
        (["--random", "-1"], "--random must not be negative; got -1"),
    ],
)
def test_wrong_numbers_of_random_configurations_are_refused(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["planner", *arguments])
    with pytest.raises(SystemExit):
        planner.main()
    assert error in capsys.readouterr().err


def test_the_largest_errors_come_first():
    common = {"configuration": "model=nano", "predicted_gib": 1.0, "step_s": 0.5}
    text = planner.table([common | {"number": n, "peak_gib": peak} for n, peak in enumerate((1.0, 1.25, 0.9))], {})
    assert "1 of 3 within 5%, the worst 20.0%." in text
    assert [line[:4] for line in text.splitlines() if line.endswith("`model=nano` |")] == ["| 1 ", "| 2 ", "| 0 "]


@pytest.mark.slow
def test_a_run_has_its_settings():
    config, plan = planned(RUNS[26], "cuda")
    assert (config.choices.model, config.choices.attention, config.max_steps) == ("gpt2", "flash", 2)
    assert (config.batch_size, config.data.micro_batch_size, plan.run.seq_len) == (1, 1, 131072)
    assert plan.run.compiled and plan.levers == Levers("selective", False, 16384)
    config, plan = planned(RUNS[28], "cuda")
    assert (plan.run.precision, plan.run.optimizer, plan.run.compiled) == ("bf16-true", "adamw_bf16", False)
