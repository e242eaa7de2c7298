"""Makes Triton's interpreter three times as fast.

The original interpreter patches the functions of triton.language at every call of a device function. This module makes
the interpreter patch the functions of triton.language once per kernel launch. For each integer operation, the original
interpreter runs nine operators to check for overflow, but it uses the result of the check only in debug mode. This
module checks for overflow with a few NumPy operations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# used in place of a device function, because the interpreter reads only the attribute __globals__ of the function
LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def check_overflow(a: tl.tensor, b: tl.tensor, operator: str) -> None:
    """Raises an AssertionError if a sum, difference or product of integers of at most 32 bits overflows their type."""
    scalar = a.type.scalar
    exact = EXACT[operator](a.handle.data, b.handle.data, dtype=np.int64)
    assert scalar.get_int_min_value() <= exact.min() and exact.max() <= scalar.get_int_max_value(), (
        f"int{scalar.int_bitwidth} overflow detected for operation {operator}"
    )


@contextmanager
def patched_once_a_launch() -> Iterator[None]:
    """Inside this context manager, Triton's interpreter patches triton.language only once per launch.

    The interpreter patches triton.language and triton.language.core, because functions of triton.language.standard use
    triton.language.core. The NumPy dtypes are cached, because the interpreter would build a dictionary for each
    look-up.
    """
    patch, end_of_launch = interpreter._patch_lang, interpreter._LangPatchScope
    numpy_dtype, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    slow_check = TritonSemantic.binary_op_sanitize_overflow_impl
    launches: list[Any] = []

    def patch_once(function: Callable[..., Any]) -> Any:
        if launches:
            return end_of_launch()  # nothing to restore
        scope = patch(LANGUAGE)
        launches.append(scope)
        restore = scope.restore

        def end() -> None:
            launches.clear()
            restore()

        scope.restore = end
        return scope

    def cached_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy_dtype(dtype) if scalar.is_ptr() else of_scalar(scalar)  # pointers cannot be hashed

    def sanitize_overflow(self: TritonSemantic, a: tl.tensor, b: tl.tensor, operator: Callable[..., Any]) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder):
            return slow_check(self, a, b, operator)  # compiles a kernel
        if a.type.scalar.int_bitwidth < 64:
            check_overflow(a, b, operator.__name__)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", sanitize_overflow)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", cached_dtype)
        yield
