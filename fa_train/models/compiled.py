"""A function that has one implementation for eager mode and another one for torch.compile."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class EagerOrCompiled(Generic[P, R]):
    """A function that calls `eager` in eager mode and `compiled` under torch.compile.

    `eager` and `compiled` return the same result, but may save different tensors for the backward pass. Each call
    checks whether it runs under torch.compile, because the mode can change between calls. For example, a module may be
    compiled after it was built.
    """

    def __init__(self, eager: Callable[P, R], compiled: Callable[P, R]) -> None:
        self.eager, self.compiled = eager, compiled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.compiled if torch.compiler.is_compiling() else self.eager)(*args, **kwargs)
