"""The public attention functions, with the API of flash-attn 2.8.

This module checks options and builds schedules (schedule.py). ops.py computes the attention. ops.py and backend.py
check that q, k and v fit together. A call that repeats the launches of an earlier call has passed this check before.
"""

import math
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import SupportsIndex

import torch
from torch import Tensor

from fa_kernels.flash_attention.checks import (
    DTYPES,
    FP8,
    described,
    name_of,
    require_consistent,
    require_constant,
    require_sinks,
    require_slopes,
    scale_of,
    shapes_of,
    softcap_of,
    window_of,
)
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.ops import differentiable_attention, needs_gradients
from fa_kernels.flash_attention.schedule import (
    LONG_DOCUMENT,
    Schedule,
    alignment,
    build_schedule,
    dense_cu_seqlens,
    dense_schedule,
)

OUT_DTYPES = (*DTYPES, torch.float64)

Outputs = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Outputs:
    """Computes attention over a batch of sequences that all have the same length.

    The last query is aligned with the last key. With causal=True, 2 queries see 5 keys as follows (1: visible):

        1 1 1 1 0
        1 1 1 1 1

    If a query sees no key, its output is 0, and its lse is the sink of its head (-inf without sinks). Both o and lse
    are differentiable in q, k, v and sinks. On GPUs of compute capability 8.9 or higher, q, k and v may be
    float8_e4m3fn if they do not require gradients.

    Args:
        q: (batch, seqlen_q, n_heads, head_dim).
        k: (batch, seqlen_k, n_kv_heads, head_dim). n_heads must be a multiple of n_kv_heads.
        v: (batch, seqlen_k, n_kv_heads, v_head_dim). head_dim and v_head_dim may differ; both are at most 256.
        dropout_p: must be 0.0; dropout is not offered.
        softmax_scale: the factor of the scores; head_dim**-0.5 by default.
        causal: if True, a query sees no keys after the key that the query is aligned with.
        window_size: (left, right), how many keys a query sees to the left and right of its aligned key; -1 means all.
        softcap: replaces each score by softcap * tanh(score / softcap). A softcap of 0 or less means no capping.
            A softcap above 1000 raises ValueError, because the kernels would lose precision.
        alibi_slopes: (n_heads,) or (batch, n_heads) float32. If a key is n tokens away from the key that the query is
            aligned with, slope * n is subtracted from the score.
        deterministic: whether gradients are bitwise repeatable. torch.use_deterministic_algorithms also makes gradients
            repeatable.
        return_attn_probs: whether to return (o, lse, an empty tensor), as flash-attn does without dropout.
        sinks: (n_heads,) float32, in nats. A sink is an additional score in the softmax of its head, without a value
            vector.
        return_lse: whether to return (o, lse).
        out_dtype: the dtype of o, by default q's dtype, or bfloat16 if q is float8_e4m3fn.
        q_descale: (n_kv_heads,) float32, the factor by which the query heads of each KV head are multiplied; only for
            float8.
        k_descale: (n_kv_heads,) float32, the factor by which each head of k is multiplied; only for float8.
        v_descale: (n_kv_heads,) float32, the factor by which each head of v is multiplied; only for float8.

    Returns:
        o (batch, seqlen_q, n_heads, v_head_dim). lse (batch, n_heads, seqlen_q) is float32, in nats, and includes the
            sinks.

    Raises:
        ValueError: if an argument has a wrong shape, dtype, device or value, for example if dropout_p is not 0.0.

    Source: FlashAttention-2, arXiv:2307.08691, Alg. 1 and 2.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v must be (batch, seqlen, heads, head_dim); got {shapes_of(q, k, v)}")
    (batch, seqlen_q, _, _), (batch_k, seqlen_k, _, _), (batch_v, _, _, _) = q.shape, k.shape, v.shape
    if not batch == batch_k == batch_v:
        raise ValueError(f"q, k and v must have the same batch size; got {batch}, {batch_k} and {batch_v}")
    _require_offered(dropout_p, out_dtype)
    window = window_of(window_size)
    alibi = []
    if alibi_slopes is not None:
        alibi = _alibi(alibi_slopes, *dense_cu_seqlens(batch, seqlen_q, seqlen_k, q.device), q)
    features = _features(q, k, v, softmax_scale, softcap, sinks, alibi, (q_descale, k_descale, v_descale))
    device = q.get_device() if q.is_cuda else q.device  # get_device() needs a tenth of the host time of q.device
    schedule = dense_schedule(batch, seqlen_q, seqlen_k, device, causal=causal, window_size=window)
    wants_lse = return_lse or return_attn_probs
    o, lse = differentiable_attention(
        q, k, v, schedule, features, _dtype_of_o(q, out_dtype), deterministic=deterministic, wants_lse=wants_lse
    )
    if lse is not None:
        lse = lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return _outputs(o, lse, q, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Outputs:
    """Computes attention over documents packed end to end.

    Document i is the slice cu_seqlens[i]:cu_seqlens[i + 1] of the rows. Documents may be empty. Rows after the last
    document have output 0, and their lse is the sink of the head (-inf without sinks). flash_attn_func describes the
    arguments that are not listed here.

    Args:
        q: (total_q, n_heads, head_dim).
        k: (total_k, n_kv_heads, head_dim), or (n_pages, page_size, n_kv_heads, head_dim) with a block_table.
        v: (total_k, n_kv_heads, v_head_dim), or (n_pages, page_size, n_kv_heads, v_head_dim) with a block_table.
        cu_seqlens_q: (n_docs + 1,) int32, the first query of each document, then the end of the last document.
        cu_seqlens_k: (n_docs + 1,) int32, the first key of each document, then the end of the last document.
        max_seqlen_q: an upper bound of the number of queries per document, used only to check cu_seqlens_q.
        max_seqlen_k: an upper bound of the number of keys per document. If max_seqlen_k is an int of at least 4096,
            kernels are chosen for documents of max_seqlen_k keys. A max_seqlen_k that is far too large may therefore
            make attention slower. Kernels are chosen for the mean length of documents if max_seqlen_k is below 4096, if
            max_seqlen_k is a tensor, or if the code is compiled.
        alibi_slopes: (n_heads,) or (n_docs, n_heads) float32.
        block_table: (n_docs, pages per document) int32. Key j of document i is in page block_table[i, j // page_size].
            Entries of block_table for pages after a document's last key are ignored. flash_attn_varlen_func copies the
            pages to n_docs * max_seqlen_k rows, but flash_attn_with_kvcache reads pages in place.

    Returns:
        o (total_q, n_heads, v_head_dim); lse is (n_heads, total_q).

    Raises:
        ValueError: for the same reasons as in flash_attn_func, or if a value in cu_seqlens or block_table is wrong.
            Values in cu_seqlens and block_table are checked if they are on the CPU. Values on a GPU are checked only
            with FLASH_ATTENTION_DEBUG=1, because this check makes the host wait for the GPU. Compiled code never checks
            values. cu_seqlens must start at 0, must not decrease and must not end after the last row. A document may
            have at most max_seqlen_q queries and max_seqlen_k keys. Every page of a document must exist. Wrong values
            that are not checked give wrong results, but never cause an access out of bounds.
    """
    paged = block_table is not None
    for name, x, in_pages in (("q", q, False), ("k", k, paged), ("v", v, paged)):
        if x.dim() != (4 if in_pages else 3):
            wanted = "(n_pages, page_size, heads, head_dim)" if in_pages else "(total, heads, head_dim)"
            raise ValueError(f"{name} must be {wanted}; got {tuple(x.shape)}")
    _require_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.device)
    if block_table is not None:
        k, v = _from_pages(k, v, block_table, cu_seqlens_k, max_seqlen_k)
    if may_read(cu_seqlens_q):
        _require_documents("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        if not paged:  # _from_pages checks documents in pages
            _require_documents("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    _require_offered(dropout_p, out_dtype)
    alibi = [] if alibi_slopes is None else _alibi(alibi_slopes, cu_seqlens_q, cu_seqlens_k, q)
    features = _features(q, k, v, softmax_scale, softcap, sinks, alibi, (q_descale, k_descale, v_descale))
    schedule = build_schedule(
        cu_seqlens_q,
        cu_seqlens_k,
        q.shape[0],
        k.shape[0],
        causal=causal,
        window_size=window_of(window_size),
        # If compiled code used max_seqlen_k, torch would compile again for each new length class
        # (schedule.LengthClass). With torch 2.11, torch would even compile again for each new value of max_seqlen_k.
        seqlen=None if torch.compiler.is_compiling() else _seqlen_that_decides(max_seqlen_k),
        gradients=needs_gradients(q, k, v, sinks),
    )
    wants_lse = return_lse or return_attn_probs
    o, lse = differentiable_attention(
        q, k, v, schedule, features, _dtype_of_o(q, out_dtype), deterministic=deterministic, wants_lse=wants_lse
    )
    return _outputs(o, lse, q, return_attn_probs)


def flash_attn_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Computes attention over a packed stream. The schedule says which keys each query sees (see schedule.py).

    A schedule is built once per batch, and all layers share it. The arguments after `schedule`, and the
    errors, are as in flash_attn_func.
    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim) -> o
    (total_q, n_heads, v_head_dim).
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v must be (tokens, heads, head_dim); got {shapes_of(q, k, v)}")
    features = _features(q, k, v, softmax_scale, softcap, sinks, (), (None, None, None))
    o, _ = differentiable_attention(q, k, v, schedule, features, q.dtype, deterministic=deterministic, wants_lse=False)
    return o


def _require_offered(dropout_p: float, out_dtype: torch.dtype | None) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0.0: attention dropout is not offered; got {dropout_p}")
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be float16, bfloat16, float32 or float64; got {name_of(out_dtype)}")


def _require_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, device: torch.device) -> None:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"{name} must be a tensor, (n_docs + 1,) int32; got a {type(cu_seqlens).__name__}")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype != torch.int32:
            raise ValueError(
                f"{name} must be (n_docs + 1,) int32; got {tuple(cu_seqlens.shape)} {name_of(cu_seqlens.dtype)}"
            )
        if cu_seqlens.device != device:
            raise ValueError(f"{name} must be on q's device {device}; got {cu_seqlens.device}")
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must hold the same number of documents; "
            f"got {cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )


def _features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    alibi: Sequence[Tensor],
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Features:
    if sinks is not None:
        require_sinks(sinks, q)
        sinks = sinks.contiguous()  # kernels expect contiguous sinks
    return Features(scale_of(q, softmax_scale), softcap_of(softcap), sinks, alibi, _descale(descales, q, k, v))


def _dtype_of_o(q: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if q.dtype == FP8 else q.dtype


def _alibi(alibi_slopes: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> list[Tensor]:
    """Returns the three tensors of Features.alibi."""
    require_slopes(alibi_slopes, cu_seqlens_q.numel() - 1, q)
    require_constant("alibi_slopes", alibi_slopes)
    slopes = alibi_slopes.expand(1, -1) if alibi_slopes.dim() == 1 else alibi_slopes
    if slopes.shape[0] == 0:  # without documents, kernels still read the slopes of document 0
        slopes = slopes.new_zeros(1, q.shape[-2])
    return [slopes.contiguous(), *alignment(cu_seqlens_q, cu_seqlens_k, math.prod(q.shape[:-2]))]


def _from_pages(
    k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int
) -> tuple[Tensor, Tensor]:
    """Copies k and v from pages to documents packed end to end.

    Shapes: k (n_pages, page_size, n_kv_heads, head_dim) -> (n_docs * max_seqlen_k, n_kv_heads, head_dim). The shapes
    of v have v_head_dim in place of head_dim.
    """
    n_docs, (n_pages, page_size) = cu_seqlens_k.numel() - 1, k.shape[:2]
    if k.shape[:2] != v.shape[:2] or n_pages * page_size == 0:
        raise ValueError(
            f"k and v must have the same number of pages and the same page size, both at least 1; got {tuple(k.shape)} "
            f"and {tuple(v.shape)}"
        )
    if (
        not isinstance(block_table, Tensor)
        or block_table.dim() != 2
        or block_table.shape[0] != n_docs
        or block_table.shape[1] == 0
        or block_table.dtype != torch.int32
        or block_table.device != k.device
    ):
        raise ValueError(
            f"block_table must be ({n_docs}, pages per document) int32 on {k.device}; got {described(block_table)}"
        )
    capacity = block_table.shape[1] * page_size
    if may_read(cu_seqlens_k):
        _require_documents("k", cu_seqlens_k, n_docs * capacity, max_seqlen_k)
    if max_seqlen_k > capacity:
        raise ValueError(
            f"max_seqlen_k must be at most {capacity}, the number of tokens that a row of block_table can hold; "
            f"got {max_seqlen_k}"
        )
    if may_read(block_table):
        used = torch.arange(0, capacity, page_size, device=k.device) < cu_seqlens_k.diff()[:, None]
        wrong = block_table[used & ((block_table < 0) | (block_table >= n_pages))]
        if wrong.numel():
            raise ValueError(f"block_table must hold pages from 0 to {n_pages - 1}; got {wrong.tolist()}")
    token = torch.arange(n_docs * max_seqlen_k, dtype=torch.int32, device=k.device)
    # No query sees the rows after the last document, so the values of these rows do not matter.
    document = (torch.searchsorted(cu_seqlens_k, token, right=True) - 1).clamp(0, max(0, n_docs - 1))
    place = (token - cu_seqlens_k[document]).clamp(0, capacity - 1)
    page, row = block_table[document, place // page_size].clamp(0, n_pages - 1), place % page_size
    return k[page, row], v[page, row]


def _outputs(o: Tensor, lse: Tensor | None, q: Tensor, return_attn_probs: bool) -> Outputs:
    if lse is None:
        return o
    return (o, lse, q.new_zeros(0)) if return_attn_probs else (o, lse)


def _descale(
    descales: tuple[Tensor | None, Tensor | None, Tensor | None], q: Tensor, k: Tensor, v: Tensor
) -> Tensor | None:
    """Returns two factors per head, (2, n_heads) float32: the scores' factor (row 0) and the output's factor (row 1).

    `descales` holds q_descale, k_descale and v_descale. Each descale is (n_kv_heads,), or None for a factor of 1.
    If all three descales are None, _descale returns None.
    """
    if descales[0] is descales[1] is descales[2] is None:
        return None
    n_heads, n_kv_heads = q.shape[-2], k.shape[-2]
    if q.dtype != FP8:
        raise ValueError(
            f"q, k and v must be float8_e4m3fn with q_descale, k_descale or v_descale; got {name_of(q.dtype)}"
        )
    require_consistent(q, k, v, None)  # the heads of q must be a multiple of those of k
    factors = []
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is None:
            factors.append(torch.ones(n_kv_heads, dtype=torch.float32, device=q.device))
            continue
        if x.shape != (n_kv_heads,) or x.dtype != torch.float32 or x.device != q.device:
            raise ValueError(f"{name} must be ({n_kv_heads},) float32 on {q.device}; got {described(x)}")
        require_constant(name, x)
        factors.append(x)
    of_q, of_k, of_v = factors
    return torch.stack([of_q * of_k, of_v]).repeat_interleave(n_heads // n_kv_heads, dim=1)


def _seqlen_that_decides(max_seqlen: int) -> int | None:
    """Returns the argument `seqlen` of build_schedule: max_seqlen if it is at least `LONG_DOCUMENT`, else None.

    A long document causes most of a batch's work, so kernels are chosen for the length of the longest document.
    """
    # If max_seqlen is a tensor, it is ignored, because reading its value could make the host wait for the GPU.
    return max_seqlen if isinstance(max_seqlen, int) and max_seqlen >= LONG_DOCUMENT else None


def may_read(cu_seqlens: Tensor) -> bool:
    """Returns whether the host is allowed to read the values of cu_seqlens.

    Reading values on a GPU makes the host wait for the GPU.
    """
    if torch.compiler.is_compiling():
        return False
    return cu_seqlens.device.type == "cpu" or os.environ.get("FLASH_ATTENTION_DEBUG") == "1"


def _require_documents(side: str, cu_seqlens: Tensor, total: int, max_seqlen: int | None) -> None:
    edges = cu_seqlens.tolist()
    longest = max((end - start for start, end in pairwise(edges)), default=0)
    if edges[0] != 0 or edges != sorted(edges) or edges[-1] > total:
        raise ValueError(
            f"cu_seqlens_{side} must start at 0, must not decrease and must end at {total} or before; got {edges}"
        )
    if max_seqlen is None or max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side} must be at least the length of the longest document, {longest}; got {max_seqlen}"
        )
