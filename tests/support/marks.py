"""Marks single cases of a parametrized test as slow, so that `make test-fast` runs only the other cases."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Returns a case (a `pytest.param`) for each value of a single parameter, and marks all these cases as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_except(kept: list[str], cases: list[Any]) -> list[Any]:
    """Returns the cases (each a `pytest.param` with an id). All cases except those named in `kept` are marked slow."""
    assert {*kept} <= {case.id for case in cases}, kept
    return [
        case if case.id in kept else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
        for case in cases
    ]


def slow_if(condition: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Returns the `marks` of a `pytest.param`: the mark `slow` if the condition is true, and otherwise no mark."""
    return (pytest.mark.slow,) if condition else ()
