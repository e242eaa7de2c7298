"""Counts the updates of weights, so that tests can check that a benchmark measures whole training steps."""

from collections.abc import Iterator

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook


@pytest.fixture
def updates() -> Iterator[list[str]]:
    """Yields a list that gets an item for each step of an optimizer in this process."""
    found: list[str] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: found.append(type(optimizer).__name__))
    yield found
    handle.remove()
