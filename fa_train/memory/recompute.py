"""Runs torch's activation checkpointing with the same default dtype in recomputation as in the forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

Result = TypeVar("Result")
# one context for the forward pass, and one for recomputation
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# From torch 2.15 on, `checkpoint` warns if saved tensors are offloaded, a policy keeps some tensors, and this argument
# is not given. With False, the kept tensors stay on the GPU, as in older versions.
_HOOKS: dict[str, Any] = {"respect_saved_tensors_hooks": False}
if not _HOOKS.keys() <= signature(checkpoint).parameters.keys():
    _HOOKS = {}


def recomputed(
    function: Callable[..., Result], *args: Any, contexts: Callable[[], Contexts] = noop_context_fn
) -> Result:
    """Computes function(*args). The backward pass recomputes all tensors that are not kept.

    Random states are not saved.
    With trainer.precision=bf16-true, Lightning changes torch's default dtype during the forward pass only. In eager
    mode, `recomputed` therefore sets the default dtype of the forward pass during recomputation. With a different
    default dtype, recomputed tensors could differ in dtype from the tensors of the forward pass. For example, torch
    2.11 saves an empty tensor of the default dtype if calls of `recomputed` are nested.
    contexts: the `context_fn` of torch.utils.checkpoint.checkpoint.
    """
    result: Result
    options: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        contexts = partial(_with_default_dtype, contexts, torch.get_default_dtype())
        options = _HOOKS
    if contexts is noop_context_fn:  # torch.compile treats any context_fn as a checkpointing policy
        result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    else:
        result = checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **options
        )
    return result


def _with_default_dtype(contexts: Callable[[], Contexts], dtype: torch.dtype) -> Contexts:
    forward, recomputation = contexts()
    return forward, _WithDefaultDtype(recomputation, dtype)


class _WithDefaultDtype:
    """A context in which `dtype` is torch's default dtype. It also enters `inner`.

    The context can be entered several times, because backward passes with retain_graph=True recompute several times.
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
