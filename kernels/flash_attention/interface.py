"""The public functions: validation, shapes and docstrings; flash-attn's names and meanings (version 2.8)."""

import math
import os
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.flash_attention.ops import flash_attention_forward
from kernels.flash_attention.schedule import (
    LONG_DOCUMENT,
    Schedule,
    alignment,
    build_schedule,
    dense_cu_seqlens,
    dense_schedule,
)
from kernels.flash_attention.tiles import interpreted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OUT_DTYPES = (*DTYPES, torch.float64)
FP8 = torch.float8_e4m3fn
MAX_HEAD_DIM = 256
UNBOUNDED = 2**30  # tokens: a window from here on is wider than any document, and token indices in int32 leave it room

Outputs = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
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
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim); got {tuple(x.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    _require_consistent(q, k, v, sinks, dropout_p)
    alibi = []
    if alibi_slopes is not None:
        alibi = _alibi(alibi_slopes, *dense_cu_seqlens(batch, seqlen_q, seqlen_k, q.device), q)
    o, lse = _attend(
        q,
        k,
        v,
        dense_schedule(batch, seqlen_q, seqlen_k, q.device, causal=causal, window_size=window_of(window_size)),
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
    window_size: tuple[int, int] = (-1, -1),
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
                f"{name} must be (n_docs + 1,) int32; got {tuple(cu_seqlens.shape)} {_name(cu_seqlens.dtype)}"
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
    _require_consistent(q, k, v, sinks, dropout_p)
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
        raise ValueError(f"q, k and v must be (tokens, heads, head_dim); got {_shapes(q, k, v)}")
    _require_consistent(q, k, v, sinks)
    return flash_attention_forward(
        q,
        k,
        v,
        schedule,
        [],
        sinks,
        None,
        scale_of(q, softmax_scale),
        max(float(softcap), 0.0),
        q.dtype,
        deterministic,
        wants_lse=False,
    )[0]


def require_backend(device: torch.device) -> None:
    """ValueError unless flash attention can run on `device`."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"attention=flash needs a CUDA GPU; this run is on {device.type}. "
            "Use attention=sdpa, or set TRITON_INTERPRET=1 to run the kernels in Triton's (slow) CPU interpreter"
        )


def window_of(window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right) in tokens, -1 where unbounded. Raises: ValueError on anything but two numbers."""
    if not isinstance(window_size, Sequence) or len(window_size) != 2 or None in window_size:
        raise ValueError(f"window_size must be (left, right), -1 where unbounded; got {window_size}")
    left, right = window_size
    return int(left) if 0 <= left < UNBOUNDED else -1, int(right) if 0 <= right < UNBOUNDED else -1


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
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be float16, bfloat16, float32 or float64; got {_name(out_dtype)}")
    return flash_attention_forward(
        q,
        k,
        v,
        schedule,
        alibi,
        sinks,
        _descale(descales, q, k),
        scale_of(q, softmax_scale),
        max(float(softcap), 0.0),
        out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype),
        deterministic,
        wants_lse,
    )


def _alibi(alibi_slopes: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> list[Tensor]:
    """What Features.alibi holds."""
    n_docs, n_heads = cu_seqlens_q.numel() - 1, q.shape[-2]
    shapes = (n_heads,), (n_docs, n_heads)
    if alibi_slopes.shape not in shapes or alibi_slopes.dtype != torch.float32 or alibi_slopes.device != q.device:
        raise ValueError(
            f"alibi_slopes must be ({n_heads},) or ({n_docs}, {n_heads}) float32 on {q.device}; "
            f"got {_described(alibi_slopes)}"
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
            f"block_table must be ({n_docs}, pages a document) int32 on {k.device}; got {_described(block_table)}"
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


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """What scores are multiplied by: head_dim**-0.5 by default. Raises: ValueError unless positive and finite."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite; got {scale}")
    return scale


def _require_consistent(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, dropout_p: float = 0.0) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0.0: attention dropout is not offered; got {dropout_p}")
    device, dtype = q.device, q.dtype
    require_backend(device)
    *_, n_heads, head_dim = q.shape
    *k_tokens, n_kv_heads, k_head_dim = k.shape
    *v_tokens, n_v_heads, v_head_dim = v.shape
    if k_tokens != v_tokens or n_kv_heads != n_v_heads:
        raise ValueError(f"k and v must have the same tokens and heads; got {_shapes(q, k, v)}")
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads; got {n_heads} and {n_kv_heads}")
    if head_dim != k_head_dim:
        raise ValueError(f"q and k must have one head_dim; got {_shapes(q, k, v)}")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_head_dim <= MAX_HEAD_DIM):
        raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}; got {head_dim} and, of v, {v_head_dim}")
    if not (dtype == k.dtype == v.dtype) or (dtype not in DTYPES and dtype != FP8):
        raise ValueError(
            "q, k and v must be of one dtype, float16, bfloat16, float32 or float8_e4m3fn; "
            f"got {_name(dtype)}, {_name(k.dtype)} and {_name(v.dtype)}"
        )
    if dtype == FP8:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("float8_e4m3fn q, k and v have no gradients; got some that require them")
        if q.is_cuda and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(
                "float8_e4m3fn needs a GPU of compute capability 8.9 or newer; "
                f"got {torch.cuda.get_device_name(device)}"
            )
    if not (device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; got {device}, {k.device} and {v.device}")
    if sinks is not None and (sinks.shape != (n_heads,) or sinks.dtype != torch.float32 or sinks.device != device):
        raise ValueError(f"sinks must be ({n_heads},) float32 on {device}; got {_described(sinks)}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q, k and v of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"


def _descale(descales: tuple[Tensor | None, Tensor | None, Tensor | None], q: Tensor, k: Tensor) -> Tensor | None:
    """(n_kv_heads,) each -> (2, n_heads) fp32, the factors of each head's scores and of its output; None is 1."""
    if descales[0] is descales[1] is descales[2] is None:
        return None
    n_heads, n_kv_heads = q.shape[-2], k.shape[-2]
    if q.dtype != FP8:
        raise ValueError(f"q_descale, k_descale and v_descale are for float8_e4m3fn; q, k and v are {_name(q.dtype)}")
    factors = []
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None and (x.shape != (n_kv_heads,) or x.dtype != torch.float32):
            raise ValueError(f"{name} must be ({n_kv_heads},) float32; got {tuple(x.shape)} {_name(x.dtype)}")
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


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {_name(x.dtype)} on {x.device}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
