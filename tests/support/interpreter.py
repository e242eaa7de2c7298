"""Makes Triton's interpreter twice as fast by patching Triton's language only once per launch.

The original interpreter patches the language again for every call of a device function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # stands for every device function


@contextmanager
def patched_once_a_launch() -> Iterator[None]:
    """Inside this context manager, Triton's interpreter patches the language only once per launch.

    A launch also patches triton.language.core, because functions of triton.language.standard need that patch. The NumPy
    dtypes are cached, because the interpreter would build a dictionary for each look-up.
    """
    patch, end_of_launch = interpreter._patch_lang, interpreter._LangPatchScope
    numpy_dtype, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
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

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", cached_dtype)
        yield
