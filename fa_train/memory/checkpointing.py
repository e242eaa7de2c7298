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


def run_block(checkpointing: Checkpointing, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """block(x), keeping x alone for the backward (full), or x and attention's o and lse (selective), or all (none).

    Everything else is computed again when the backward reaches the block; `block` has no dropout, so the random
    state is not kept. Attentions without an operator of their own (naive, chunked, and torch's where it falls back to
    materialised scores) have nothing that selective could keep: for them it is full.
    Call it inside the module that is compiled, so that torch.compile sees the policy and partitions by it.
    """
    if checkpointing == "none":
        return block(x)
    if checkpointing == "full":
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=_KEEP_ATTENTION)


def _keep_attention(
    context: SelectiveCheckpointContext, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """torch's policy: called with each operator of the forward."""
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_ATTENTION = partial(create_selective_checkpoint_contexts, _keep_attention)
