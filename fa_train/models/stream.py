"""Checks the tensors of a packed stream, and builds the schedule of attention: the keys that each query sees."""

import torch
from torch import Tensor

from fa_kernels.flash_attention.schedule import Schedule, build_schedule, causal_schedule, length_class_of
from fa_train.parallel.context.attention import SharedSchedule, shared_schedule
from fa_train.parallel.context.traffic import Traffic


def require_stream(tokens: Tensor, cu_seqlens: Tensor | None, **like_tokens: Tensor | None) -> None:
    """Raises: ValueError if tokens or cu_seqlens has a wrong shape, or another tensor is not shaped like tokens."""
    if tokens.dim() != 1 or tokens.numel() == 0:
        raise ValueError(f"tokens must be one packed stream (total,) of at least 1 token; got {tuple(tokens.shape)}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype != torch.int32):
        raise ValueError(
            f"cu_seqlens must be (n_docs + 1,) int32 with n_docs at least 1; "
            f"got {tuple(cu_seqlens.shape)} {str(cu_seqlens.dtype).removeprefix('torch.')}"
        )
    for name, x in like_tokens.items():
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens, {tuple(tokens.shape)}; got {tuple(x.shape)}")


def windowed_schedule(
    cu_seqlens: Tensor | None, total: int, device: torch.device, window: int | None, mean_seqlen: int | None
) -> Schedule:
    """Builds the causal schedule of the documents.

    Example: a stream of two documents with 4 and 3 tokens, so cu_seqlens is [0, 4, 7]. Query i sees the keys from
    key_start[i] to key_end[i] - 1:

        key_end   = [1, 2, 3, 4, 5, 6, 7]
        key_start = [0, 0, 0, 0, 4, 4, 4] without a window
        key_start = [0, 0, 1, 2, 4, 4, 5] with window=2

    window: the number of tokens that a query sees, including its own, or None for all earlier tokens.
    mean_seqlen: as for fa_train.models.gpt.GPT.forward.
    """
    if window is None or window >= total:
        return causal_schedule(cu_seqlens, total, device, mean_seqlen)
    documents = torch.tensor([0, total], dtype=torch.int32, device=device) if cu_seqlens is None else cu_seqlens
    padded = cu_seqlens is not None
    return build_schedule(
        documents, documents, total, total, causal=True, window_size=(window - 1, 0), padded=padded, seqlen=mean_seqlen
    )


def context_schedule(traffic: Traffic, window: int | None, mean_seqlen: int | None) -> SharedSchedule:
    """Builds the schedule of a rank that shares its stream with other ranks.

    window, mean_seqlen: as for windowed_schedule. By default, mean_seqlen is the number of tokens in the padded stream.
    """
    length = traffic.sent.shape[0] if mean_seqlen is None else mean_seqlen
    return shared_schedule(traffic, length_class_of(length if window is None else min(length, window)))
