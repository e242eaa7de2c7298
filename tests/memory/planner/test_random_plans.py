"""Compares the planner with simulated steps of the random configurations of scripts/bench/random_plans.py.

By default, the configurations in NUMBERS run. With PLANNER_CASES=all, the first 1,000 configurations run, which takes
10 minutes on 2 cores. Configurations that train.py refuses are skipped.
"""

from dataclasses import replace

import pytest

from fa_train.memory.planner.predict import predict
from fa_train.memory.planner.weights import trained_sizes
from fa_train.training import build_model
from scripts.bench.planner import planned, random_configuration
from tests.memory.support.plans import EVERY_CASE, predicted_peak
from tests.memory.support.simulated import simulate

# the configurations with the largest errors so far, and some others
NUMBERS = (13, 27, 30, 65, 87, 134, 151, 156, 175, 252, 648)


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted({*range(1000), *NUMBERS}) if EVERY_CASE else NUMBERS)
def test_predictions_are_the_simulated_peaks_of_random_configurations(number):
    """The test switches compilation off in every configuration."""
    try:
        config, plan = planned(random_configuration(number), "cpu")
    except ValueError:
        pytest.skip("train.py refuses this configuration")
    plan = replace(plan, run=replace(plan.run, compiled=False))
    if predict(plan).moment == "the optimizer":
        pytest.skip("the simulated step ends before the optimizer's update")
    run, vocab_size = plan.run, plan.model.vocab_size
    in_place = run.accumulates and run.adapters is None
    step = simulate(lambda: build_model(config, vocab_size), run.tokens, run.precision, in_place)
    gradients = sum(trained_sizes(plan)) * run.gradient_bytes if run.accumulates else 0
    # autograd adds the two gradients of a tied embedding in place on real tensors, but not on fake tensors
    sum_of_two = f"aten.add.Tensor [({vocab_size}, {plan.model.dim})]"
    error = predicted_peak(plan) / (gradients + max(now for now, what in step.timeline if what != sum_of_two)) - 1
    assert -0.04 < error < 0.1
