"""Tests scripts/bench/random_plans.py on a CPU: which configurations it draws, and which files it writes."""

import json
import sys

import pytest

from fa_train.memory.planner.predict import predict
from scripts.bench import random_plans
from scripts.bench.random_plans import measured, overrides_of, planned, table


def test_a_number_always_draws_the_same():
    assert overrides_of(3) == overrides_of(3) != overrides_of(4)
    drawn = [" ".join(overrides_of(number)[1]) for number in range(200)]
    for part in ("adapter=qlora", "offset_rmsnorm", "post_norms: true", "memory.offload=all", "[q_proj,v_proj]"):
        assert any(part in overrides for overrides in drawn)


@pytest.mark.slow
def test_most_configurations_are_accepted():
    accepted = 0
    for number in range(6):
        try:
            _, plan = planned(number, "cpu")
        except ValueError:
            continue
        accepted += 1
        assert predict(plan).allocated > 0
        overrides = overrides_of(number)[1]
        assert ("adapter=none" in overrides) == (plan.run.adapters is None)
    assert accepted >= 4


@pytest.mark.slow
def test_a_small_configuration_is_measured_and_written(tmp_path, monkeypatch):
    small = ["model=nano", "model.n_layers=1", "model.vocab_size=64", "batch_size=1", "trainer.precision=32-true"]
    small += ["lit_gpt.compile_model=false", "data.document_len=100000"]
    monkeypatch.setattr(random_plans, "overrides_of", lambda number: (64 + number, small))
    monkeypatch.setattr(random_plans, "planned", lambda number, device: planned(number, "cpu"))
    monkeypatch.setattr(random_plans, "measured", lambda config, device: measured(config, "cpu"))
    monkeypatch.setattr(random_plans, "describe", lambda *given: {"GPU": "none"})
    monkeypatch.setattr(random_plans, "require_gpu", lambda script: None)
    monkeypatch.setattr(sys, "argv", ["random_plans", "--count", "2", "--out", str(tmp_path / "found")])
    random_plans.main()
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["seq_len"] for row in rows] == [64, 65] and all(row["peak_gib"] > 0 for row in rows)
    assert (tmp_path / "found.md").read_text() == table(rows, {"GPU": "none"})
