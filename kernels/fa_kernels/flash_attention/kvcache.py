"""flash_attn_with_kvcache: attention over a cache of keys and values, with the API of flash-attn 2.8."""

from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fa_kernels.flash_attention.checks import (
    DTYPES,
    MAX_HEAD_DIM,
    described,
    name_of,
    require_backend,
    require_slopes,
    scale_of,
    softcap_of,
    window_of,
)
from fa_kernels.flash_attention.portable.cache import Cache, Rotary, append_to_cache
from fa_kernels.flash_attention.portable.decode import MAX_SPLITS, decode_attention

PAGE_UNIT = 16  # page sizes must be multiples of 16 tokens, because kernels read blocks of at least 16 keys


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to a cache in place, and computes attention of q over the cache. There are no gradients.

    The last query is aligned with the last key, which can be one of the appended keys. A query that sees no key has
    output 0 and lse -inf. With rotary_cos, key j of k is rotated to position cache_seqlens + j. With `causal` or a
    window, query i is rotated to position cache_seqlens + i. If there is neither `causal` nor a window, all queries are
    rotated to position cache_seqlens.

    Args:
        q: (batch, seqlen_q, n_heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, n_kv_heads, head_dim), or (n_pages, page_size, n_kv_heads, head_dim) with a
            block_table. page_size must be a multiple of 16. The last dimension of k_cache must have stride 1.
        v_cache: like k_cache, but its head_dim may differ.
        k: (batch, seqlen_new, n_kv_heads, head_dim), or None to append nothing.
        v: like k, but with the head_dim of v_cache.
        rotary_cos: (positions, rotary_dim / 2). `positions` must be at least the number of tokens that the cache can
            hold for each sequence. rotary_dim must be a multiple of 16.
        rotary_sin: like rotary_cos.
        cache_seqlens: an int or (batch,) int32, the number of cached tokens before k is appended; by default the whole
            length of the cache.
        cache_batch_idx: (batch,) int32, the index of each sequence's row in the cache.
        cache_leftpad: (batch,) int32, the first position of each sequence that queries are allowed to see.
        block_table: (batch, pages per sequence) int32. Entries of block_table after a sequence's last page are ignored.
        softmax_scale: the factor of the scores; head_dim**-0.5 by default.
        causal: if True, a query sees no keys after the key that the query is aligned with.
        window_size: (left, right), how many keys a query sees to the left and right of its aligned key; -1 means all.
        softcap: replaces each score by softcap * tanh(score / softcap). A softcap of 0 or less means no capping.
            A softcap above 1000 raises ValueError, because the kernel would lose precision.
        rotary_interleaved: whether rotary embedding pairs columns 0 and 1, 2 and 3, and so on. If rotary_interleaved is
            False, column i is paired with column i + rotary_dim / 2.
        alibi_slopes: (n_heads,) or (batch, n_heads) float32. If a key is n tokens away from the query's aligned key,
            slope * n is subtracted from the key's score.
        num_splits: the number of parts into which each sequence's keys are split. If num_splits is 0, the
            number is chosen automatically.
        return_softmax_lse: whether to return (o, lse).

    Returns:
        o (batch, seqlen_q, n_heads, v_cache's head_dim) in q's dtype; lse (batch, n_heads, seqlen_q) float32 in nats.

    Raises:
        ValueError: if an argument has a wrong shape, dtype, device or value. k requires cache_seqlens, and rotary_cos
            requires k. block_table and cache_batch_idx must not be combined. Values of cache_seqlens, cache_batch_idx
            and block_table are checked only on the CPU. On a GPU, wrong values in cache_seqlens, cache_batch_idx and
            block_table are not detected, but never cause an access outside of the cache.

    Source: Flash-Decoding, pytorch.org/blog/flash-decoding; FlashAttention-2, arXiv:2307.08691.
    """
    require_backend(q.device, q.dtype)
    _require_shapes(q, k_cache, v_cache, k, v)
    batch = q.shape[0]
    seqlen_new = 0 if k is None else k.shape[1]
    table = _page_table(k_cache, batch, cache_batch_idx, block_table)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    seqlens = _seqlens(cache_seqlens, batch, capacity, seqlen_new, k is not None, q.device)
    if cache_leftpad is not None:
        _require_int32("cache_leftpad", cache_leftpad, (batch,), q.device)
    _require_pages_in_range(k_cache, table, seqlens, seqlen_new, block_table is not None)
    _require_rotary(rotary_cos, rotary_sin, k is not None, q, capacity)
    if alibi_slopes is not None:
        require_slopes(alibi_slopes, batch, q)
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 0 to {MAX_SPLITS}; got {num_splits}")
    scale, cap = scale_of(q, softmax_scale), softcap_of(softcap)
    left, right = window_of(window_size)
    if causal:
        right = 0
    rotary_by_token = left >= 0 or right >= 0

    angles = [] if rotary_cos is None or rotary_sin is None else [rotary_cos.contiguous(), rotary_sin.contiguous()]
    if k is not None and v is not None:
        append(*_rows_dense(k, v), k_cache, v_cache, seqlens, table, angles, rotary_interleaved)
    leftpad = None if cache_leftpad is None else cache_leftpad.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    o, lse = decode(
        *_rows_dense(q), k_cache, v_cache, seqlens, seqlen_new, table, leftpad, angles, rotary_interleaved,
        rotary_by_token, slopes, scale, cap, left, right, num_splits,
    )  # fmt: skip
    return (o, lse) if return_softmax_lse else o


@torch.library.custom_op("flash_attention::append", mutates_args=("k_cache", "v_cache"))
def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    table: Tensor | None,
    angles: list[Tensor],
    interleaved: bool,
) -> None:
    """Writes k and v to the cache, after the first seqlens[i] tokens of sequence i. `angles` is empty or [cos, sin]."""
    with torch.cuda.device_of(k):  # Triton launches kernels on the current device
        append_to_cache(k, v, Cache(k_cache, v_cache, seqlens, table, None), _rotary(angles, interleaved))


@torch.library.custom_op("flash_attention::decode", mutates_args=())
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    seqlen_new: int,
    table: Tensor | None,
    leftpad: Tensor | None,
    angles: list[Tensor],
    interleaved: bool,
    rotary_by_token: bool,
    slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    left: int,
    right: int,
    n_splits: int,
) -> tuple[Tensor, Tensor]:
    """Computes attention of q over the cached keys and values.

    Shapes: q (batch, seqlen_q, n_heads, head_dim) -> o (batch, seqlen_q, n_heads, v_cache's head_dim), lse (batch,
    n_heads, seqlen_q) fp32.
    """
    with torch.cuda.device_of(q):  # Triton launches kernels on the current device
        return decode_attention(
            q,
            Cache(k_cache, v_cache, seqlens, table, leftpad),
            seqlen_new,
            rotary=_rotary(angles, interleaved),
            rotary_by_token=rotary_by_token,
            slopes=slopes,
            softmax_scale=softmax_scale,
            softcap=softcap,
            left=left,
            right=right,
            n_splits=n_splits,
        )


@decode.register_fake
def _decode_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    seqlen_new: int,
    table: Tensor | None,
    leftpad: Tensor | None,
    angles: list[Tensor],
    interleaved: bool,
    rotary_by_token: bool,
    slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    left: int,
    right: int,
    n_splits: int,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, n_heads, _ = q.shape
    o = q.new_empty(batch, seqlen_q, n_heads, v_cache.shape[-1])
    return o, q.new_empty(batch, n_heads, seqlen_q, dtype=torch.float32)


@register_flop_formula(torch.ops.flash_attention.decode)
def _decode_flops(q_shape, k_shape, v_shape, seqlens_shape, seqlen_new, table_shape, *args, **kwargs) -> int:
    """Counts the FLOPs of all positions in the cache, because the host does not know the lengths of sequences."""
    batch, seqlen_q, n_heads, head_dim = q_shape
    capacity = k_shape[1] * (1 if table_shape is None else table_shape[1])
    return 2 * batch * seqlen_q * capacity * n_heads * (head_dim + v_shape[-1])


def _rotary(angles: list[Tensor], interleaved: bool) -> Rotary | None:
    return Rotary(angles[0], angles[1], interleaved) if angles else None


def _rows_dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _require_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    """Raises ValueError unless q, the cache, k and v have matching shapes, one dtype, one device and valid strides."""
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together; got only {'v' if k is None else 'k'}")
    new = {} if k is None or v is None else {"k": k, "v": v}
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | new
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim); got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            raise ValueError(
                f"q, the cache, k and v must have the same dtype, which is float16, bfloat16 or float32; "
                f"got q of {name_of(q.dtype)} and {name} of {name_of(x.dtype)}"
            )
        if x.device != q.device:
            raise ValueError(f"q, the cache, k and v must be on one device; got q on {q.device}, {name} on {x.device}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must have a dense last dimension; got strides {x.stride()}")
        if new and 0 in (stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
            raise ValueError(
                f"{name} must not be expanded, because new rows would overwrite each other; got strides {x.stride()}"
            )
    n_heads, n_kv_heads = q.shape[2], k_cache.shape[2]
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must have the same sequences, tokens and heads; "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads; got {n_heads} and {n_kv_heads}")
    if q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"q and k_cache must have the same head_dim; got {q.shape[3]} and {k_cache.shape[3]}")
    if not (1 <= q.shape[3] <= MAX_HEAD_DIM and 1 <= v_cache.shape[3] <= MAX_HEAD_DIM):
        raise ValueError(
            f"head_dim must be from 1 to {MAX_HEAD_DIM}; got {q.shape[3]} for q and {v_cache.shape[3]} for v_cache"
        )
    for name, x in new.items():
        wanted = (q.shape[0], new["k"].shape[1], n_kv_heads, tensors[f"{name}_cache"].shape[3])
        if x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} to fit q, k and {name}_cache; got {tuple(x.shape)}")


def _require_int32(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, {shape} int32 on {device}; got a {type(x).__name__}")
    if x.shape != shape or x.dtype != torch.int32 or x.device != device:
        raise ValueError(f"{name} must be {shape} int32 on {device}; got {described(x)}")


def _page_table(
    k_cache: Tensor, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor | None:
    """Returns the page indices of each sequence, (batch, pages per sequence) int32, or None if page i holds sequence i.

    In the result, the last dimension has stride 1. A cache without pages counts as a cache with one page per sequence.
    """
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx must be None with a block_table; got both")
    if block_table is None and k_cache.shape[0] < (batch if cache_batch_idx is None else 1):
        raise ValueError(f"k_cache must have rows for at least {batch} sequences; got {k_cache.shape[0]}")
    if cache_batch_idx is not None:
        _require_int32("cache_batch_idx", cache_batch_idx, (batch,), k_cache.device)
        return cache_batch_idx[:, None]
    if block_table is None:
        return None
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.shape[1] == 0:
        raise ValueError(f"block_table must be (batch, pages per sequence) int32; got {described(block_table)}")
    _require_int32("block_table", block_table, (batch, block_table.shape[1]), k_cache.device)
    n_pages, page_size = k_cache.shape[:2]
    if n_pages == 0 or page_size == 0 or page_size % PAGE_UNIT:
        raise ValueError(
            f"the pages of k_cache must have a multiple of {PAGE_UNIT} tokens if there is a block_table; "
            f"got {n_pages} pages of {page_size} tokens"
        )
    return _rows_dense(block_table)[0]


def _seqlens(
    cache_seqlens: int | Tensor | None, batch: int, capacity: int, seqlen_new: int, appends: bool, device: torch.device
) -> Tensor:
    """Returns how many tokens of each sequence are cached, (batch,) int32.

    Values on the CPU are checked. Values on a GPU are not checked, because the host would have to wait for them.
    """
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens must say where to append k and v; got None")
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        seqlens, known = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device), [cache_seqlens]
    else:
        _require_int32("cache_seqlens", cache_seqlens, (batch,), device)
        seqlens, known = cache_seqlens.contiguous(), _values(cache_seqlens) or [0]
    if not 0 <= min(known) <= max(known) + seqlen_new <= capacity:
        raise ValueError(
            f"cache_seqlens and the new tokens must add up to at most {capacity} tokens, and cache_seqlens must not be "
            f"negative; got {min(known)} to {max(known)} cached and {seqlen_new} new tokens"
        )
    return seqlens


def _require_pages_in_range(
    k_cache: Tensor, table: Tensor | None, seqlens: Tensor, seqlen_new: int, paged: bool
) -> None:
    """Raises ValueError if a sequence uses a page that does not exist. Only values on the CPU are checked."""
    if table is None or not _values(seqlens):
        return
    n_pages, page_size = k_cache.shape[:2]
    used = (torch.arange(table.shape[1]) * page_size)[None, :] < seqlens[:, None] + seqlen_new
    wrong = table[used & ((table < 0) | (table >= n_pages))]
    if wrong.numel():
        name = "block_table" if paged else "cache_batch_idx"
        raise ValueError(
            f"{name} must hold indices of k_cache's first dimension, from 0 to {n_pages - 1}; got {wrong.tolist()}"
        )


def _values(x: Tensor) -> list[int]:
    """Returns the values of x, or an empty list if x is on a GPU or is being traced."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    return x.tolist()


def _require_rotary(cos: Tensor | None, sin: Tensor | None, appends: bool, q: Tensor, capacity: int) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(
            f"rotary_cos and rotary_sin must be given together; got only {'sin' if cos is None else 'cos'}"
        )
    if not appends:
        raise ValueError("rotary_cos and rotary_sin must be None without k and v; got both")
    fits = cos.dim() == 2 and cos.shape[0] >= capacity and cos.shape[1] % 8 == 0 and 2 * cos.shape[1] <= q.shape[3]
    if not fits or cos.shape != sin.shape:
        raise ValueError(
            f"rotary_cos and rotary_sin must be (positions, rotary_dim / 2) with at least {capacity} positions and a "
            f"rotary_dim that is a multiple of 16 and at most {q.shape[3]}; got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    dtypes = {q.dtype, torch.float32}
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dtype not in dtypes or x.device != q.device:
            wanted = " or ".join(sorted(map(name_of, dtypes)))
            raise ValueError(f"{name} must be {wanted} on {q.device}; got {described(x)}")
