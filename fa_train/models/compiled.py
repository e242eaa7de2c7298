"""Functions with one variant for eager mode and one for torch.compile."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class EagerOrCompiled(Generic[P, R]):
    """A function that runs `eager`, and that torch.compile traces as `compiled`.

    Both return the same result; they may differ in what they keep for the backward. The choice is made in each call: a
    user may compile a module at any time after it was built, and a compiled module may still run in eager mode.
    """

    def __init__(self, eager: Callable[P, R], compiled: Callable[P, R]) -> None:
        self.eager, self.compiled = eager, compiled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.compiled if torch.compiler.is_compiling() else self.eager)(*args, **kwargs)
