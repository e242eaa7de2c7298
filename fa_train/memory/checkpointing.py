"""What a decoder block keeps for its backward: all that autograd asks for, attention's results, or its input alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fa_kernels.flash_attention.ops  # noqa: F401  registers torch.ops.flash_attention

Checkpointing = Literal["none", "selective", "full"]
RunBlock = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

# torch's operators behind scaled_dot_product_attention; their names are private, so some may be missing
_SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# the operators whose work grows with the square of a document's length; their results are o and lse of each query
ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.flash_attention.forward.default,
        *(getattr(torch.ops.aten, name).default for name in _SDPA if hasattr(torch.ops.aten, name)),
    }
)


def require_checkpointing(checkpointing: str) -> None:
    """ValueError unless it is one of `Checkpointing`."""
    known = get_args(Checkpointing)
    if checkpointing not in known:
        raise ValueError(f"memory.checkpointing must be one of {', '.join(known)}; got {checkpointing}")


def block_runner(checkpointing: Checkpointing) -> RunBlock:
    """Returns `run`: run(block, x) is block(x), and keeps for the backward what `checkpointing` says.

    none keeps all that autograd asks for, full keeps x, selective keeps x and attention's o and lse. Everything else is
    computed again when the backward reaches the block; `block` has no dropout, so the random state is not kept.
    Attentions without an operator of their own (naive, chunked, and torch's where it falls back to materialised scores)
    have nothing that selective could keep: for them it equals full.
    Call `run` inside the module that is compiled, so that torch.compile sees the policy and partitions by it.
    """
    return {"none": _keep_all, "selective": _keep_input_and_attention, "full": _keep_input}[checkpointing]


def _keep_all(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def _keep_input(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def _keep_input_and_attention(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=_KEEP_ATTENTION)


def _keep_attention(
    context: SelectiveCheckpointContext, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """torch's policy: called with each operator of the forward."""
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_ATTENTION = partial(create_selective_checkpoint_contexts, _keep_attention)
