"""Triton's interpreter at twice its speed: what it does at every call of a device function, once a launch instead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # of all device functions, Triton's own too


@contextmanager
def patched_once_a_launch() -> Iterator[None]:
    """Each call looks through triton.language for functions to replace, though the launch around it has done so.

    A launch replaces those of triton.language.core too, which otherwise the first call from triton.language.standard
    does. Of numpy's dtypes, the interpreter makes a dictionary whenever it needs one.
    """
    patch, end_of_launch = interpreter._patch_lang, interpreter._LangPatchScope
    numpy_dtype, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    launches: list[Any] = []

    def patch_once(function: Callable[..., Any]) -> Any:
        if launches:
            return end_of_launch()  # with nothing to restore
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
        return numpy_dtype(dtype) if scalar.is_ptr() else of_scalar(scalar)  # pointers have no hash

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", cached_dtype)
        yield
