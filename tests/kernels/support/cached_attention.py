"""Compares outputs of flash_attn_with_kvcache with dense attention in fp64, and the cache with expected contents."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fa_kernels import flash_attn_with_kvcache
from tests.kernels.support.attention_check import DEVICE
from tests.support.tolerance import assert_as_accurate

NAN = float("nan")


def int32(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Applies rotary embedding by its definition to x (tokens, heads, head_dim) at the positions (tokens,)."""
    half = cos.shape[1]
    angles = (cos[positions].to(x.dtype)[:, None], sin[positions].to(x.dtype)[:, None])
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (first * angles[0] - second * angles[1], first * angles[1] + second * angles[0])
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], dim=-1)


def dense(q: Tensor, k: Tensor, v: Tensor, scale, left, right, softcap, slopes) -> tuple[Tensor, Tensor]:
    """Dense attention of one sequence: q (M, n_heads, D), k, v (N, n_kv_heads, D) -> o (M, n_heads, D), lse (n_heads,
    M).
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [H, N, D]
    scores = q.transpose(0, 1) @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    n_queries, n_keys = scores.shape[1:]
    ahead = torch.arange(n_keys, device=q.device)[None, :] - (n_keys - n_queries)
    ahead = ahead - torch.arange(n_queries, device=q.device)[:, None]  # position of the key minus position of the query
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * ahead.abs()
    hidden = (left >= 0) & (-ahead > left) | (right >= 0) & (ahead > right)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (p @ v).transpose(0, 1), lse


def reference(q, caches, new, rotary, lengths, leftpad, scale, causal, window, softcap, interleaved, slopes, dtype):
    """Returns what flash_attn_with_kvcache should return as o and lse, and appends new keys and values to `caches`.

    caches: for each sequence a pair of k and v, each (capacity, n_kv_heads, D).
    """
    left, right = (window[0], 0) if causal else window
    outputs = []
    for i, length in enumerate(lengths):
        query, total = q[i].to(dtype), length
        if new:
            k, v = new[0][i].to(dtype), new[1][i]
            total = length + k.shape[0]
            if rotary:
                k = rotate(k, torch.arange(length, total, device=q.device), *rotary, interleaved)
                steps = torch.arange(q.shape[1], device=q.device) * int(left >= 0 or right >= 0)
                # rounded as in flash_attn_with_kvcache
                query = rotate(query, length + steps, *rotary, interleaved).to(q.dtype).to(dtype)
            caches[i][0][length:total] = k.to(q.dtype)
            caches[i][1][length:total] = v
        k, v = (x[leftpad[i] : total].to(dtype) for x in caches[i])
        slope = slopes if slopes is None or slopes.dim() == 1 else slopes[i]
        outputs.append(dense(query, k, v, scale, left, right, softcap, slope))
    return [torch.stack(x) for x in zip(*outputs, strict=True)]


def check(
    lengths: list[int],
    *,
    seqlen_q: int = 1,
    seqlen_new: int = 0,
    capacity: int = 64,
    n_heads: int = 2,
    n_kv_heads: int = 1,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    page_size: int | None = None,
    batch_idx: list[int] | None = None,
    leftpad: list[int] | None = None,
    rotary_dim: int = 0,
    interleaved: bool = True,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    num_splits: int = 1,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> None:
    """Calls flash_attn_with_kvcache, and checks its outputs and the cache.

    Before the call, every unused position of the cache (before leftpad, or after length) holds NaN. The reference is
    computed on the CPU, so that many test processes can share a GPU.
    """
    batch, v_head_dim = len(lengths), v_head_dim or head_dim
    widths = (head_dim, v_head_dim)
    q = torch.randn(batch, seqlen_q, n_heads, head_dim).to(dtype)
    new = [torch.randn(batch, seqlen_new, n_kv_heads, d).to(dtype) for d in widths] if seqlen_new else []
    contents = [[torch.randn(capacity, n_kv_heads, d).to(dtype) for d in widths] for _ in lengths]
    for i, length in enumerate(lengths):
        for x in contents[i]:
            x[length:] = NAN
            x[: leftpad[i] if leftpad else 0] = NAN
    stored = store(contents, [n + seqlen_new for n in lengths], page_size, batch_idx)

    # a query's position can be beyond the capacity of the cache
    positions = max(capacity, max(lengths) + seqlen_q)
    rotary = [torch.randn(positions, rotary_dim // 2).to(dtype) for _ in range(2)] if rotary_dim else []
    k_cache, v_cache = caches = [x.to(DEVICE, copy=True) for x in stored.caches]
    k, v = (x.to(DEVICE) for x in new) if new else (None, None)
    cos, sin = (x.to(DEVICE) for x in rotary) if rotary else (None, None)
    o, lse = flash_attn_with_kvcache(
        q.to(DEVICE), k_cache, v_cache, k, v, cos, sin, cache_seqlens=int32(*lengths),
        cache_batch_idx=int32(*batch_idx) if batch_idx else None, cache_leftpad=int32(*leftpad) if leftpad else None,
        block_table=None if stored.table is None else stored.table.to(DEVICE), softmax_scale=softmax_scale,
        causal=causal, window_size=window, softcap=softcap, rotary_interleaved=interleaved, alibi_slopes=slopes,
        num_splits=num_splits, return_softmax_lse=True,
    )  # fmt: skip
    assert o.shape == (batch, seqlen_q, n_heads, v_head_dim) and o.dtype == dtype
    assert lse.shape == (batch, n_heads, seqlen_q) and lse.dtype == torch.float32

    expected, (exact, same) = references(
        contents, dtype, q, new, rotary, lengths, leftpad or [0] * batch,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal, window, softcap, interleaved, slopes if slopes is None else slopes.cpu(),
    )  # fmt: skip
    assert_outputs(o.cpu(), lse.cpu(), exact, same)
    fresh = [slice(length, length + seqlen_new) for length in lengths]
    assert_caches([x.cpu() for x in caches], stored, expected, fresh)


@dataclass
class Stored:
    """Caches on the CPU, and the rows or pages in which each sequence is stored."""

    caches: list[Tensor]  # k and v: (rows or pages, tokens in one row or page, n_kv_heads, D)
    table: Tensor | None
    places: list[list[int]]


def store(contents: list[list[Tensor]], used: list[int], page_size: int | None, batch_idx: list[int] | None) -> Stored:
    """Builds caches that hold `contents` in rows, or in pages in a random order. Rows without a sequence hold NaN.

    used: the number of tokens of each sequence. Unused entries of the block table are out of range.
    """
    pairs = list(zip(*contents, strict=True))
    if page_size is None:
        places = batch_idx or list(range(len(contents)))
        caches = [x[0].new_full((max(places) + 1, *x[0].shape), NAN) for x in pairs]
        for cache, rows in zip(caches, pairs, strict=True):
            cache[places] = torch.stack(rows)
        return Stored(caches, None, [[place] for place in places])
    pages = contents[0][0].shape[0] // page_size
    order = torch.randperm(len(contents) * pages)
    caches = []
    for rows in pairs:
        cache = rows[0].new_empty(order.numel(), page_size, *rows[0].shape[1:])
        cache[order] = torch.stack(rows).view_as(cache)
        caches.append(cache)
    table = order.to(torch.int32).view(len(contents), pages)
    for i, n_tokens in enumerate(used):
        table[i, -(-n_tokens // page_size) :] = 2**30
    return Stored(caches, table, order.view(len(contents), pages).tolist())


def references(contents, dtype, q, *arguments):
    """Returns the expected contents of the caches, and the results of `reference` in fp64 and in `dtype`."""
    held = [[[x.clone() for x in pair] for pair in contents] for _ in range(2)]
    computed = [
        reference(q, copy, *arguments, dtype=compute)
        for copy, compute in zip(held, (torch.float64, dtype), strict=True)
    ]
    return held[0], computed


def assert_outputs(o: Tensor, lse: Tensor, exact: list[Tensor], same: list[Tensor]) -> None:
    """Checks o and lse against dense attention in fp64 (exact) and in the same dtype (same)."""
    (exact_o, exact_lse), (same_o, same_lse) = exact, same
    unseen = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), unseen)
    assert torch.all(o.transpose(1, 2)[unseen] == 0)
    floor = 4 * torch.finfo(torch.float32).eps * max(1.0, exact_lse[~unseen].abs().max().item() if len(lse) else 0)
    assert_as_accurate("o", o, exact_o, same_o, floor=floor)
    seen_lse, exact_lse, same_lse = (x.masked_fill(unseen, 0.0) for x in (lse, exact_lse, same_lse.float()))
    assert_as_accurate("lse", seen_lse, exact_lse, same_lse, floor=floor)


def assert_caches(caches: list[Tensor], before: Stored, expected: list[list[Tensor]], fresh: list[slice]) -> None:
    """Checks that the caches hold the new tokens of each sequence, and that all other elements are unchanged.

    fresh: the positions of the new tokens of each sequence.
    """
    for pair, rows, places in zip(expected, fresh, before.places, strict=True):
        for cache, old, wanted in zip(caches, before.caches, pair, strict=True):
            found, found_before = cache[places].flatten(0, 1), old[places].flatten(0, 1)
            # rotated keys can differ from the reference in the last bit
            torch.testing.assert_close(found[rows], wanted[rows], rtol=2 * torch.finfo(cache.dtype).eps, atol=1e-6)
            found_before[rows] = found[rows]
            assert torch.equal(found.nan_to_num(7.0), found_before.nan_to_num(7.0))
    for cache in caches:
        unused = sorted({*range(cache.shape[0])}.difference(*before.places))
        assert torch.isnan(cache[unused]).all()
