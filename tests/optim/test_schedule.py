"""Tests the learning rate over a run."""

import pytest
from torch import nn

from fa_train.optim.schedule import warmup_cosine
from tests.optim.support.optimizers import optimizer_of


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        pytest.param(0, 0.1, id="first"),
        pytest.param(4, 0.5, id="warming"),
        pytest.param(9, 1.0, id="warm"),
        pytest.param(10, 1.0, id="peak"),
        pytest.param(60, 0.55, id="half-way"),
        pytest.param(110, 0.1, id="last"),
        pytest.param(200, 0.1, id="past-the-end"),
    ],
)
def test_warmup_and_cosine(step, factor):
    scheduler = warmup_cosine(optimizer_of(nn.Linear(2, 2)), warmup_steps=10, max_steps=110, min_lr_ratio=0.1)
    assert scheduler.lr_lambdas[0](step) == pytest.approx(factor)


def test_without_warmup_and_with_nothing_but_warmup():
    optimizer = optimizer_of(nn.Linear(2, 2))
    assert warmup_cosine(optimizer, warmup_steps=0, max_steps=10, min_lr_ratio=0.0).lr_lambdas[0](0) == 1.0
    factor = warmup_cosine(optimizer, warmup_steps=100, max_steps=20, min_lr_ratio=0.0).lr_lambdas[0]
    assert [factor(step) for step in (0, 19)] == [0.01, 0.2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((-1, 10, 0.1), "warmup_steps must be at least 0; got -1", id="warmup"),
        pytest.param((1, 0, 0.1), "max_steps must be at least 1; got 0", id="max-steps"),
        pytest.param((1, 10, 1.5), "min_lr_ratio must be from 0 to 1; got 1.5", id="ratio"),
    ],
)
def test_errors(arguments, message):
    warmup_steps, max_steps, min_lr_ratio = arguments
    with pytest.raises(ValueError, match=message):
        warmup_cosine(
            optimizer_of(nn.Linear(2, 2)), warmup_steps=warmup_steps, max_steps=max_steps, min_lr_ratio=min_lr_ratio
        )
