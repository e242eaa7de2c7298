"""Attention over q, k and v that are packed in one tensor. The API is that of flash-attn 2.8.

Kernels read q, k and v in place, as views of the packed tensor. The gradient of the packed tensor is also one tensor.
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
    """Computes flash_attn_func for q, k and v that are packed in one tensor.

    Arguments that are not listed here, and errors, are as in flash_attn_func.

    Args:
        qkv: (batch, seqlen, 3, n_heads, head_dim).

    Returns:
        o (batch, seqlen, n_heads, head_dim).
    """
    q, k, v = _views("qkv", qkv, "batch, seqlen", 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        sinks=sinks, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip


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
    """Computes flash_attn_func for k and v that are packed in one tensor.

    Arguments that are not listed here, and errors, are as in flash_attn_func.

    Args:
        q: (batch, seqlen_q, n_heads, head_dim).
        kv: (batch, seqlen_k, 2, n_kv_heads, head_dim). n_heads must be a multiple of n_kv_heads.

    Returns:
        o (batch, seqlen_q, n_heads, head_dim).
    """
    k, v = _views("kv", kv, "batch, seqlen", 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        sinks=sinks, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip


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
    """Computes flash_attn_varlen_func for q, k and v that are packed in one tensor.

    Arguments that are not listed here, and errors, are as in flash_attn_varlen_func.

    Args:
        qkv: (total, 3, n_heads, head_dim).
        cu_seqlens: (n_docs + 1,) int32, the first token of each document, then the end of the last document.
        max_seqlen: an upper bound of the number of tokens per document.

    Returns:
        o (total, n_heads, head_dim).
    """
    q, k, v = _views("qkv", qkv, "total", 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, sinks=sinks, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip


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
    """Computes flash_attn_varlen_func for k and v that are packed in one tensor.

    Arguments that are not listed here, and errors, are as in flash_attn_varlen_func.

    Args:
        q: (total_q, n_heads, head_dim).
        kv: (total_k, 2, n_kv_heads, head_dim). n_heads must be a multiple of n_kv_heads.

    Returns:
        o (total_q, n_heads, head_dim).
    """
    k, v = _views("kv", kv, "total", 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
        sinks=sinks, return_lse=return_lse, out_dtype=out_dtype,
    )  # fmt: skip


def _views(name: str, joined: Tensor, tokens: str, n_tensors: int) -> tuple[Tensor, ...]:
    """Splits `joined` along its third-last dimension, and returns the parts as views.

    Autograd stacks the gradients of the views in one operation.
    """
    dims = tokens.count(",") + 4
    if joined.dim() != dims or joined.shape[-3] != n_tensors:
        raise ValueError(f"{name} must be ({tokens}, {n_tensors}, heads, head_dim); got {tuple(joined.shape)}")
    return joined.unbind(-3)
