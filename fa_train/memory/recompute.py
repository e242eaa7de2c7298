"""torch's activation checkpoint with the default dtype of the forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

Result = TypeVar("Result")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # for the forward pass, for recomputation


def recomputed(
    function: Callable[..., Result], *args: Any, contexts: Callable[[], Contexts] = noop_context_fn
) -> Result:
    """Computes function(*args). The backward pass recomputes what is not kept. Random states are not saved.

    With trainer.precision=bf16-true, Lightning changes torch's default dtype during the forward pass only. In eager
    mode, recomputation has the default dtype of the forward pass as well. Otherwise, the recomputed tensors could
    differ. One of them is an empty tensor that torch 2.11 saves for each call of `recomputed` inside another.
    contexts: as `context_fn` of torch.utils.checkpoint.checkpoint.
    """
    result: Result
    if not torch.compiler.is_compiling():
        contexts = partial(_with_default_dtype, contexts, torch.get_default_dtype())
    if contexts is noop_context_fn:
        result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    else:
        result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result


def _with_default_dtype(contexts: Callable[[], Contexts], dtype: torch.dtype) -> Contexts:
    forward, recomputation = contexts()
    return forward, _WithDefaultDtype(recomputation, dtype)


class _WithDefaultDtype:
    """A context in which `dtype` is torch's default dtype. It also enters `inner`.

    It can be entered several times, because backward passes with retain_graph=True recompute several times.
    """

    def __init__(self, inner: AbstractContextManager[Any], dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype

    def __enter__(self) -> None:
        self.outside = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        torch.set_default_dtype(self.outside)
        return self.inner.__exit__(*error)
