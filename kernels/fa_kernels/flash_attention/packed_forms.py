"""Attention over q, k and v that one projection wrote into one tensor: views of it, with flash-attn's names (2.8).

The parts are read in place by their strides, and their gradients come back as one tensor.
"""

from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor

from fa_kernels.flash_attention.interface import Outputs, flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Outputs:
    """Self-attention over a batch of sequences of one length.

    Shapes: qkv (batch, seqlen, 3, n_heads, head_dim) -> o (batch, seqlen, n_heads, head_dim).
    Everything else as flash_attn_func. Raises: ValueError as it does, and on another shape of qkv.
    """
    q, k, v = _parts("qkv", qkv, "batch, seqlen", 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks=sinks,
        return_lse=return_lse,
        out_dtype=out_dtype,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Outputs:
    """Attention over a batch of sequences of one length, k and v in one tensor.

    Shapes: q (batch, seqlen_q, n_heads, head_dim); kv (batch, seqlen_k, 2, n_kv_heads, head_dim), n_heads a multiple
    of n_kv_heads -> o like q.
    Everything else as flash_attn_func. Raises: ValueError as it does, and on another shape of kv.
    """
    k, v = _parts("kv", kv, "batch, seqlen", 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks=sinks,
        return_lse=return_lse,
        out_dtype=out_dtype,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Outputs:
    """Self-attention over documents packed end to end.

    Shapes: qkv (total, 3, n_heads, head_dim); cu_seqlens (n_docs + 1,) int32 -> o (total, n_heads, head_dim).
    Everything else as flash_attn_varlen_func. Raises: ValueError as it does, and on another shape of qkv.
    """
    q, k, v = _parts("qkv", qkv, "total", 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks=sinks,
        return_lse=return_lse,
        out_dtype=out_dtype,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Outputs:
    """Attention over documents packed end to end, k and v in one tensor.

    Shapes: q (total_q, n_heads, head_dim); kv (total_k, 2, n_kv_heads, head_dim), n_heads a multiple of n_kv_heads;
    cu_seqlens_q, cu_seqlens_k (n_docs + 1,) int32 -> o like q.
    Everything else as flash_attn_varlen_func. Raises: ValueError as it does, and on another shape of kv.
    """
    k, v = _parts("kv", kv, "total", 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks=sinks,
        return_lse=return_lse,
        out_dtype=out_dtype,
    )


def _parts(name: str, joined: Tensor, tokens: str, parts: int) -> tuple[Tensor, ...]:
    """Views of the parts along the third-last dimension; their gradients are written by one stack."""
    dims = tokens.count(",") + 4
    if joined.dim() != dims or joined.shape[-3] != parts:
        raise ValueError(f"{name} must be ({tokens}, {parts}, heads, head_dim); got {tuple(joined.shape)}")
    return joined.unbind(-3)
