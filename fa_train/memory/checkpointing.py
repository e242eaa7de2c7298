"""Activation checkpointing of decoder blocks: "none", "full", or "selective", which does not recompute attention."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import fa_kernels.flash_attention.ops  # noqa: F401  registers torch.ops.flash_attention
import fa_train.parallel.context.attention_operators  # noqa: F401  registers torch.ops.fa_train
from fa_train.memory.recompute import recomputed

Checkpointing = Literal["none", "selective", "full"]
RunBlock = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

# The private torch operators that scaled_dot_product_attention calls. A name in _SDPA may not exist in other versions
# of torch.
_SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# the operators that compute attention; they return the output o and the logsumexp lse of each query
ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.flash_attention.forward.default,
        torch.ops.fa_train.context_forward.default,
        *(getattr(torch.ops.aten, name).default for name in _SDPA if hasattr(torch.ops.aten, name)),
    }
)
# aten.max computes the largest magnitude of a tensor, which determines the tensor's float8 scale. If the result of
# aten.max is kept, the backward pass does not read the whole tensor again.
_KEPT = ATTENTION_OPERATORS | {torch.ops.aten.max.default}


def require_checkpointing(checkpointing: str) -> None:
    """Raises: ValueError if `checkpointing` is not "none", "selective" or "full"."""
    known = get_args(Checkpointing)
    if checkpointing not in known:
        raise ValueError(f"memory.checkpointing must be one of {', '.join(known)}; got {checkpointing}")


def block_runner(checkpointing: Checkpointing) -> RunBlock:
    """Returns a function `run` such that run(block, x) computes block(x) with activation checkpointing.

    With "none", `run` keeps all saved tensors. With "full", `run` keeps only x. With "selective", `run` keeps x and
    also attention's output o and logsumexp lse. The backward pass recomputes everything that is not kept. Random states
    are not saved, because a block has no dropout. If attention is not a single operator, "selective" does the same as
    "full". Naive attention, chunked attention and SDPA's math fallback are not single operators. Call `run` inside the
    compiled module, so that torch.compile applies the checkpointing policy.
    """
    return {"none": _keep_all, "selective": _keep_input_and_attention, "full": _keep_input}[checkpointing]


def _keep_all(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def _keep_input(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # without a policy, torch 2.11 would save the output of a compiled autograd.Function, for example of TiledFFN
    contexts = _KEEP_NOTHING if torch.compiler.is_compiling() else noop_context_fn
    return recomputed(block, x, contexts=contexts)


def _keep_input_and_attention(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return recomputed(block, x, contexts=_KEEP_ATTENTION)


def _keep_attention(
    context: SelectiveCheckpointContext, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Returns whether to keep an operator's result. torch calls this function for each operator of the forward pass."""
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all(
    context: SelectiveCheckpointContext, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_ATTENTION = partial(create_selective_checkpoint_contexts, _keep_attention)
_KEEP_NOTHING = partial(create_selective_checkpoint_contexts, _recompute_all)
