"""The public functions: validation, shapes and docstrings; flash-attn's names and meanings (version 2.8)."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from fa_kernels.flash_attention.checks import DTYPES, FP8, described, name_of, require_consistent, scale_of, shapes_of
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.ops import flash_attention_forward
from fa_kernels.flash_attention.schedule import (
    LONG_DOCUMENT,
    Schedule,
    alignment,
    build_schedule,
    dense_cu_seqlens,
    dense_schedule,
    kept_schedule,
)

OUT_DTYPES = (*DTYPES, torch.float64)
UNBOUNDED = 2**30  # tokens: a window from here on is wider than any document, and token indices in int32 leave it room

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
    """Attention over a batch of sequences of one length.

    Shapes: q (batch, seqlen_q, n_heads, head_dim); k, v (batch, seqlen_k, n_kv_heads, head_dim), n_heads a multiple
    of n_kv_heads; v's head_dim may differ from q's and k's, both at most 256; alibi_slopes (n_heads,) or
    (batch, n_heads); sinks (n_heads,) -> o (batch, seqlen_q, n_heads, v's head_dim), in out_dtype, else q's. With
    return_lse also lse (batch, n_heads, seqlen_q); with return_attn_probs o, lse and an empty tensor, which is what
    flash-attn gives for the probabilities without dropout.
    Units: softmax_scale multiplies the scores, head_dim**-0.5 by default; window_size in tokens (left, right) beside
    the query itself, -1 unbounded; softcap bounds a score to softcap * tanh(score / softcap), 0 or less is none; an
    alibi slope is subtracted for each token of distance; a sink is one more score in the softmax, in nats, without a
    value; lse in nats, fp32, sinks counted in.
    causal aligns the last query with the last key. A query that sees no key gives 0, and lse -inf or its sink.
    Differentiable in q, k, v and sinks, through o and lse. With
    deterministic, as with torch.use_deterministic_algorithms, gradients are bitwise repeatable.
    q, k and v may be float8_e4m3fn, without gradients, on GPUs of compute capability 8.9 and newer; o is then bfloat16
    unless out_dtype says otherwise, and q_descale, k_descale and v_descale (n_kv_heads,) fp32 are what the values of
    each KV head, and of the query heads that share it, stand for when multiplied with.
    Raises: ValueError on a shape, dtype or head-count mismatch and on dropout, which is not offered.
    Source: FlashAttention-2, arXiv:2307.08691, Alg. 1 and 2.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v must be (batch, seqlen, heads, head_dim); got {shapes_of(q, k, v)}")
    (batch, seqlen_q, _, _), (batch_k, seqlen_k, _, _), (batch_v, _, _, _) = q.shape, k.shape, v.shape
    if not batch == batch_k == batch_v:
        raise ValueError(f"q, k and v must have one batch size; got {batch}, {batch_k} and {batch_v}")
    _require_offered(dropout_p, out_dtype)
    window = window_of(window_size)
    schedule = kept_schedule(batch, seqlen_q, seqlen_k, q, causal, window)
    # before the GPU is asked for anything: without what follows here that is attention, and the backend checks
    if schedule is None or alibi_slopes is not None or q.dtype == FP8:
        require_consistent(q, k, v, sinks)
    alibi = []
    if alibi_slopes is not None:
        alibi = _alibi(alibi_slopes, *dense_cu_seqlens(batch, seqlen_q, seqlen_k, q.device), q)
    if schedule is None:
        schedule = dense_schedule(batch, seqlen_q, seqlen_k, q.device, causal=causal, window_size=window)
    o, lse = _attend(
        q,
        k,
        v,
        schedule,
        alibi,
        softmax_scale,
        softcap,
        sinks,
        out_dtype,
        deterministic,
        (q_descale, k_descale, v_descale),
        return_lse or return_attn_probs,
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
    """Attention over documents packed end to end.

    Shapes: q (total_q, n_heads, head_dim); k, v (total_k, n_kv_heads, head_dim); cu_seqlens_q and cu_seqlens_k
    (n_docs + 1,) int32, where document i is the rows cu_seqlens[i] to cu_seqlens[i + 1]; alibi_slopes (n_heads,) or
    (n_docs, n_heads) -> o (total_q, n_heads, v's head_dim); with return_lse also lse (n_heads, total_q).
    Documents may be empty; rows past the last one give 0 and lse -inf (or their sink).
    With a block_table (n_docs, pages a document) int32, k and v are pages (n_pages, page_size, n_kv_heads, head_dim),
    and key j of document i lies in page block_table[i, j // page_size]; entries past a document's keys are never
    looked at. They are copied to n_docs * max_seqlen_k rows first: flash_attn_with_kvcache reads pages in place.
    Everything else as flash_attn_func. max_seqlen_k, which may be too large at some cost in speed, is for the choice
    of kernels, in compiled code the mean length is; max_seqlen_q is flash-attn's and not needed here.
    Raises: ValueError as flash_attn_func and, where cu_seqlens are on the CPU or FLASH_ATTENTION_DEBUG=1 allows to
    wait for the GPU, on cu_seqlens that do not start at 0, decrease or end past the last row, on a max_seqlen below the
    longest document and on pages that are not there. Wrong ones that are not checked give wrong numbers, but nothing
    is read out of bounds.
    """
    paged = block_table is not None
    for name, x, in_pages in (("q", q, False), ("k", k, paged), ("v", v, paged)):
        if x.dim() != (4 if in_pages else 3):
            wanted = "(n_pages, page_size, heads, head_dim)" if in_pages else "(total, heads, head_dim)"
            raise ValueError(f"{name} must be {wanted}; got {tuple(x.shape)}")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype != torch.int32:
            raise ValueError(
                f"{name} must be (n_docs + 1,) int32; got {tuple(cu_seqlens.shape)} {name_of(cu_seqlens.dtype)}"
            )
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}; got {cu_seqlens.device}")
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must hold the same number of documents; "
            f"got {cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )
    if block_table is not None:
        k, v = _from_pages(k, v, block_table, cu_seqlens_k, max_seqlen_k)
    if _may_read(cu_seqlens_q):
        _require_documents("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        _require_documents("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    _require_offered(dropout_p, out_dtype)
    require_consistent(q, k, v, sinks)
    o, lse = _attend(
        q,
        k,
        v,
        build_schedule(
            cu_seqlens_q,
            cu_seqlens_k,
            q.shape[0],
            k.shape[0],
            causal=causal,
            window_size=window_of(window_size),
            # compiled code would be compiled anew where other lengths choose other kernels, and in torch 2.11 where
            # max_seqlen_k were so much as handed on
            seqlen=None if torch.compiler.is_compiling() else _seqlen_that_decides(max_seqlen_k),
        ),
        [] if alibi_slopes is None else _alibi(alibi_slopes, cu_seqlens_q, cu_seqlens_k, q),
        softmax_scale,
        softcap,
        sinks,
        out_dtype,
        deterministic,
        (q_descale, k_descale, v_descale),
        return_lse or return_attn_probs,
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
    """Attention under a schedule built once for the batch (`causal_schedule`), which all layers share.

    Shapes: q (total_q, n_heads, head_dim); k, v (total_k, n_kv_heads, head_dim); sinks (n_heads,) -> o like q.
    Units and errors as flash_attn_func.
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v must be (tokens, heads, head_dim); got {shapes_of(q, k, v)}")
    features = Features(scale_of(q, softmax_scale), max(float(softcap), 0.0), sinks, ())
    return flash_attention_forward(q, k, v, schedule, features, q.dtype, deterministic, False)[0]


def window_of(window_size: Iterable[SupportsIndex]) -> tuple[int, int]:
    """(left, right) in tokens, -1 where unbounded.

    The two integers may come as a tuple, a list, a tensor or a NumPy array, as flash-attn takes them.
    Raises: ValueError on anything else.
    """
    try:
        left, right = window_size
        if type(left) is not int or type(right) is not int:
            left, right = index(left), index(right)
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be two integers, -1 where unbounded; got {window_size}") from None
    return left if 0 <= left < UNBOUNDED else -1, right if 0 <= right < UNBOUNDED else -1


def _require_offered(dropout_p: float, out_dtype: torch.dtype | None) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0.0: attention dropout is not offered; got {dropout_p}")
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be float16, bfloat16, float32 or float64; got {name_of(out_dtype)}")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    alibi: Sequence[Tensor],
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of what is consistent: o like q, of v's head_dim, and lse (n_heads, total_q), None if not wanted."""
    features = Features(scale_of(q, softmax_scale), max(float(softcap), 0.0), sinks, alibi, _descale(descales, q, k))
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    return flash_attention_forward(q, k, v, schedule, features, out_dtype, deterministic, wants_lse)


def _alibi(alibi_slopes: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> list[Tensor]:
    """What Features.alibi holds."""
    n_docs, n_heads = cu_seqlens_q.numel() - 1, q.shape[-2]
    shapes = (n_heads,), (n_docs, n_heads)
    if alibi_slopes.shape not in shapes or alibi_slopes.dtype != torch.float32 or alibi_slopes.device != q.device:
        raise ValueError(
            f"alibi_slopes must be ({n_heads},) or ({n_docs}, {n_heads}) float32 on {q.device}; "
            f"got {described(alibi_slopes)}"
        )
    slopes = alibi_slopes.expand(1, -1) if alibi_slopes.dim() == 1 else alibi_slopes
    return [slopes.contiguous(), *alignment(cu_seqlens_q, cu_seqlens_k, q.shape[:-2].numel())]


def _from_pages(
    k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int
) -> tuple[Tensor, Tensor]:
    """Pages (n_pages, page_size, n_kv_heads, head_dim) -> documents end to end, (n_docs * max_seqlen_k, ...)."""
    n_docs, (n_pages, page_size) = cu_seqlens_k.numel() - 1, k.shape[:2]
    if k.shape[:2] != v.shape[:2] or n_pages * page_size == 0:
        raise ValueError(f"k and v must have the same pages, one at least; got {tuple(k.shape)} and {tuple(v.shape)}")
    if (
        block_table.dim() != 2
        or block_table.shape[0] != n_docs
        or block_table.shape[1] == 0
        or block_table.dtype != torch.int32
        or block_table.device != k.device
    ):
        raise ValueError(
            f"block_table must be ({n_docs}, pages a document) int32 on {k.device}; got {described(block_table)}"
        )
    capacity = block_table.shape[1] * page_size
    if max_seqlen_k > capacity:
        raise ValueError(f"max_seqlen_k must fit the {capacity} tokens of a row of block_table; got {max_seqlen_k}")
    if _may_read(block_table):
        used = torch.arange(0, capacity, page_size, device=k.device) < cu_seqlens_k.diff()[:, None]
        wrong = block_table[used & ((block_table < 0) | (block_table >= n_pages))]
        if wrong.numel():
            raise ValueError(f"block_table must be from 0 to {n_pages - 1}; got {wrong.tolist()}")
    token = torch.arange(n_docs * max_seqlen_k, dtype=torch.int32, device=k.device)
    # rows past the last document are in none, whatever is copied there
    document = (torch.searchsorted(cu_seqlens_k, token, right=True) - 1).clamp(0, max(0, n_docs - 1))
    place = (token - cu_seqlens_k[document]).clamp(0, capacity - 1)
    page, row = block_table[document, place // page_size].clamp(0, n_pages - 1), place % page_size
    return k[page, row], v[page, row]


def _outputs(o: Tensor, lse: Tensor | None, q: Tensor, return_attn_probs: bool) -> Outputs:
    if lse is None:
        return o
    return (o, lse, q.new_zeros(0)) if return_attn_probs else (o, lse)


def _descale(descales: tuple[Tensor | None, Tensor | None, Tensor | None], q: Tensor, k: Tensor) -> Tensor | None:
    """(n_kv_heads,) each -> (2, n_heads) fp32, the factors of each head's scores and of its output; None is 1."""
    if descales[0] is descales[1] is descales[2] is None:
        return None
    n_heads, n_kv_heads = q.shape[-2], k.shape[-2]
    if q.dtype != FP8:
        raise ValueError(f"q_descale, k_descale and v_descale are for float8_e4m3fn; q, k and v are {name_of(q.dtype)}")
    factors = []
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None and (x.shape != (n_kv_heads,) or x.dtype != torch.float32):
            raise ValueError(f"{name} must be ({n_kv_heads},) float32; got {tuple(x.shape)} {name_of(x.dtype)}")
        factors.append(torch.ones(n_kv_heads, device=q.device) if x is None else x)
    of_q, of_k, of_v = factors
    return torch.stack([of_q * of_k, of_v]).repeat_interleave(n_heads // n_kv_heads, dim=1)


def _seqlen_that_decides(max_seqlen: int) -> int | None:
    """What build_schedule takes for the documents' length: the longest one's if it is long, whose work is the most."""
    # a tensor is not looked at, which would wait for the GPU
    return max_seqlen if isinstance(max_seqlen, int) and max_seqlen >= LONG_DOCUMENT else None


def _may_read(cu_seqlens: Tensor) -> bool:
    """Whether looking into cu_seqlens waits for nothing that the caller has not asked for."""
    if torch.compiler.is_compiling():
        return False
    return cu_seqlens.device.type == "cpu" or os.environ.get("FLASH_ATTENTION_DEBUG") == "1"


def _require_documents(side: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    edges = cu_seqlens.tolist()
    longest = max((end - start for start, end in pairwise(edges)), default=0)
    if edges[0] != 0 or edges != sorted(edges) or edges[-1] > total:
        raise ValueError(f"cu_seqlens_{side} must start at 0, not decrease and end at {total} or before; got {edges}")
    if max_seqlen < longest:
        raise ValueError(f"max_seqlen_{side} must be at least the longest document, {longest}; got {max_seqlen}")
