"""Tests which configurations scripts/bench/random_plans.py draws."""

import pytest

from fa_train.memory.planner.predict import predict
from scripts.bench.planner import planned, random_configuration
from scripts.bench.random_plans import overrides_of


def test_a_number_always_draws_the_same():
    assert overrides_of(3) == overrides_of(3) != overrides_of(4)
    drawn = [" ".join(overrides_of(number)[1]) for number in range(200)]
    for part in ("adapter=qlora", "offset_rmsnorm", "post_norms: true", "memory.offload=all", "[q_proj,v_proj]"):
        assert any(part in overrides for overrides in drawn)


@pytest.mark.slow
def test_most_configurations_are_accepted():
    accepted = 0
    for number in range(6):
        configuration = random_configuration(number)
        try:
            _, plan = planned(configuration, "cpu")
        except ValueError:
            continue
        accepted += 1
        assert predict(plan).allocated > 0
        assert ("adapter=none" in configuration.overrides) == (plan.run.adapters is None)
    assert accepted >= 4
