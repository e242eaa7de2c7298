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
    cu_seqlens: Tensor | None, total: int, device: torch.device, window: int | None, seqlen: int | None
) -> Schedule:
    """Builds the causal schedule of the documents.

    window: the number of tokens that a query sees, or None for all earlier tokens.
    seqlen: the mean document length in tokens (mean_seqlen of fa_train.models.gpt.GPT.forward), or None.
    """
    if window is None or window >= total:
        return causal_schedule(cu_seqlens, total, device, seqlen)
    documents = torch.tensor([0, total], dtype=torch.int32, device=device) if cu_seqlens is None else cu_seqlens
    padded = cu_seqlens is not None
    return build_schedule(
        documents, documents, total, total, causal=True, window_size=(window - 1, 0), padded=padded, seqlen=seqlen
    )


def context_schedule(traffic: Traffic, window: int | None, seqlen: int | None) -> SharedSchedule:
    """Builds the schedule of a rank that shares its stream with other ranks.

    window, seqlen: as in windowed_schedule. By default, seqlen is the number of tokens in the padded stream.
    """
    seqlen = traffic.sent.shape[0] if seqlen is None else seqlen
    return shared_schedule(traffic, length_class_of(seqlen if window is None else min(seqlen, window)))
