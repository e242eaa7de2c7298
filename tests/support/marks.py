"""Marks single cases of a parametrized test as slow, so that `make test-fast` runs the others."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Returns the values as parameters that are marked slow. Each value is the value of one argument."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_if(condition: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Returns the `marks` of a `pytest.param`: slow if the condition is true."""
    return (pytest.mark.slow,) if condition else ()
