"""Compares flash_attn_with_kvcache with dense attention in fp64 over the keys that the cache must contain."""

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
    """Returns the outputs and the lse of flash_attn_with_kvcache, and updates `caches` as that function would.

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
    """Checks the outputs and the cache after the call. The outputs must be as accurate as dense attention in the same
    dtype. The cache must contain the new keys and values, and all its other elements must keep every bit.

    Before the call, the cache holds NaN before leftpad and after length. Unused entries of the block table are out of
    range. The reference is computed on the CPU, so that many test processes can share a GPU.
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

    table = None
    if page_size is None:
        places = batch_idx or list(range(batch))
        stored = [torch.full((max(places) + 1, capacity, n_kv_heads, d), NAN, dtype=dtype) for d in widths]
        for content, place in zip(contents, places, strict=True):
            for cache, x in zip(stored, content, strict=True):
                cache[place] = x
    else:
        pages = capacity // page_size
        order = torch.randperm(batch * pages)
        table = order.to(torch.int32).view(batch, pages)
        stored = []
        for width, rows in zip(widths, zip(*contents, strict=True), strict=True):
            cache = torch.empty(batch * pages, page_size, n_kv_heads, width, dtype=dtype)
            cache[order] = torch.stack(rows).view_as(cache)
            stored.append(cache)
        for i, length in enumerate(lengths):
            table[i, -(-(length + seqlen_new) // page_size) :] = 2**30

    # a query's position can be beyond the capacity of the cache
    positions = max(capacity, max(lengths) + seqlen_q)
    rotary = [torch.randn(positions, rotary_dim // 2).to(dtype) for _ in range(2)] if rotary_dim else []
    caches = [x.to(DEVICE, copy=True) for x in stored]
    k, v = (x.to(DEVICE) for x in new) if new else (None, None)
    cos, sin = (x.to(DEVICE) for x in rotary) if rotary else (None, None)
    o, lse = flash_attn_with_kvcache(
        q.to(DEVICE),
        caches[0],
        caches[1],
        k,
        v,
        cos,
        sin,
        cache_seqlens=int32(*lengths),
        cache_batch_idx=int32(*batch_idx) if batch_idx else None,
        cache_leftpad=int32(*leftpad) if leftpad else None,
        block_table=None if table is None else table.to(DEVICE),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        rotary_interleaved=interleaved,
        alibi_slopes=slopes,
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    assert o.shape == (batch, seqlen_q, n_heads, v_head_dim) and o.dtype == dtype
    assert lse.shape == (batch, n_heads, seqlen_q) and lse.dtype == torch.float32
    o, lse, *caches = (x.cpu() for x in (o, lse, *caches))

    results = []
    slopes = slopes if slopes is None else slopes.cpu()
    for compute in (torch.float64, dtype):
        held = [[x.clone() for x in pair] for pair in contents]
        pads = leftpad or [0] * batch
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        results.append(
            reference(q, held, new, rotary, lengths, pads, scale, causal, window, softcap, interleaved, slopes, compute)
        )
        if compute == torch.float64:
            expected = held
    (exact_o, exact_lse), (same_o, same_lse) = results
    unseen = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), unseen)
    assert torch.all(o.transpose(1, 2)[unseen] == 0)
    floor = 4 * torch.finfo(torch.float32).eps * max(1.0, exact_lse[~unseen].abs().max().item() if len(lse) else 0)
    assert_as_accurate("o", o, exact_o, same_o, floor=floor)
    seen_lse, exact_lse, same_lse = (x.masked_fill(unseen, 0.0) for x in (lse, exact_lse, same_lse.float()))
    assert_as_accurate("lse", seen_lse, exact_lse, same_lse, floor=floor)

    for i, (pair, length) in enumerate(zip(expected, lengths, strict=True)):
        pages_of_it = order.view(batch, -1)[i].tolist() if page_size else [batch_idx[i] if batch_idx else i]
        for cache, old, wanted in zip(caches, stored, pair, strict=True):
            found, found_before = cache[pages_of_it].flatten(0, 1), old[pages_of_it].flatten(0, 1)
            fresh = slice(length, length + seqlen_new)
            # rotated keys can differ in the last bit
            torch.testing.assert_close(found[fresh], wanted[fresh], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            found_before[fresh] = found[fresh]
            assert torch.equal(found.nan_to_num(7.0), found_before.nan_to_num(7.0))
    if batch_idx:
        others = [i for i in range(stored[0].shape[0]) if i not in batch_idx]
        assert all(torch.isnan(x[others]).all() for x in caches)
