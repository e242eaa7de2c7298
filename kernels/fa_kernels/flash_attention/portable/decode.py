"""Decoding: attention of a few queries over a long cache of keys and values.

If each sequence has one query, there are too few tiles of queries to fill a GPU. The keys of a sequence are therefore
split over several programs, which write their outputs in fp32. A second kernel merges the outputs of the splits by
their lse. The method is Flash-Decoding (pytorch.org/blog/flash-decoding; arXiv:2307.08691, section 3.1). A tile holds
all query heads that share a KV head, so that each key is read once. decode_tile.py has the phases of the decoding
kernel. cache.py describes the cache, and appends new tokens to it.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import LN_2, LOG2_E, Arch, arch_of, interpreted, multiprocessors, shared_memory
from fa_kernels.flash_attention.portable.cache import Cache, Rotary, angles_of, positions_of, rotary_switches, stride_of
from fa_kernels.flash_attention.portable.decode_tile import (
    Scoring,
    attend,
    begin_softmax,
    keys_of_sequence,
    load_queries,
    load_slopes,
    locate_item,
    pages_of_sequence,
    rows_of_tile,
    span_of_split,
    store_outputs,
)
from fa_kernels.flash_attention.tiles import TileConfig, fit, precision_of, tile_config
from fa_kernels.options import OPTIONS

MAX_SPLITS = 128
MIN_SPLIT = 256  # minimum number of keys per split; with fewer keys, merging costs more time than splitting saves


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen_q", "seqlen_new", "n_kv_heads", "n_pages", "page_size", "capacity", "n_tiles", "n_splits",
        "left", "right", "seqlen_rotary",
    ]
)  # fmt: skip
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, seqlens_ptr, leftpad_ptr, table_ptr, slopes_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_table, stride_slopes, stride_cos,
    batch, seqlen_q, seqlen_new, n_kv_heads, n_pages, page_size, capacity, n_tiles, n_splits, left, right,
    seqlen_rotary, softmax_scale, softcap,
    PAGED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTARY_BY_TOKEN: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes the attention of BLOCK_M rows of one sequence over one part of the keys of one KV head.

    The keys are split into n_splits parts. A row is a query of one head: row r is token `r // GROUP` and head
    `r % GROUP` of the group. o (n_splits, batch, seqlen_q, n_heads, DV) and lse (n_splits, batch, n_heads, seqlen_q)
    are contiguous. With one split, o and lse are the final result. Heads of k have D columns, padded with zeros to
    BLOCK_D, a power of two. Heads of v have DV columns, padded to BLOCK_DV. This kernel cannot use two column blocks
    per head. With two column blocks, ptxas 12.8 generates wrong matrix descriptors if K or V is copied to shared memory
    through registers.
    """
    item = locate_item(n_tiles, n_splits, n_kv_heads)
    keys = keys_of_sequence(item.sequence, seqlens_ptr, leftpad_ptr, seqlen_new, capacity)
    rows = rows_of_tile(item, keys, seqlen_q, left, right, GROUP, BLOCK_M)
    span = span_of_split(item, keys, seqlen_q, left, right, n_splits, GROUP, BLOCK_M, BLOCK_N)
    q = load_queries(
        item, keys, rows, q_ptr, stride_qb, stride_qt, stride_qh, cos_ptr, sin_ptr, stride_cos, seqlen_rotary,
        D, BLOCK_D, ROTARY, INTERLEAVED, ROTARY_BY_TOKEN,
    )  # fmt: skip
    scoring = Scoring(softmax_scale, softcap, load_slopes(item, rows, slopes_ptr, stride_slopes))
    pages = pages_of_sequence(
        item, k_ptr, v_ptr, table_ptr, stride_table, n_pages, page_size,
        stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, PAGED,
    )  # fmt: skip
    running = begin_softmax(BLOCK_M, BLOCK_DV)
    # Phases 0 and 2 process the blocks at both ends of the range of keys, which need a mask. Every row sees all keys
    # that phase 1 processes.
    for phase in tl.static_range(3):
        running = attend(
            running, q, rows, keys, pages, scoring,
            span.start if phase == 0 else span.whole_start if phase == 1 else span.whole_end,
            span.whole_start if phase == 0 else span.whole_end if phase == 1 else span.end,
            phase != 1, PAGED, leftpad_ptr is not None, HAS_SOFTCAP, D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, PRECISION,
        )  # fmt: skip
    store_outputs(running, item, rows, o_ptr, lse_ptr, batch, seqlen_q, n_kv_heads, GROUP, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["seqlen_q", "n_heads", "n_rows", "n_splits"])
def _merge_kernel(
    partial_ptr, partial_lse_ptr, o_ptr, lse_ptr, seqlen_q, n_heads, n_rows, n_splits,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program merges the outputs of all splits for one query of one head, weighted by the splits' softmax sums."""
    row = tl.program_id(0).to(tl.int64)  # a flat index into a tensor of shape (batch, seqlen_q, n_heads)
    head, token, sequence = row % n_heads, row // n_heads % seqlen_q, row // n_heads // seqlen_q
    lse_row = (sequence * n_heads + head) * seqlen_q + token
    splits = tl.arange(0, MAX_SPLITS).to(tl.int64)
    lse = tl.load(partial_lse_ptr + splits * n_rows + lse_row, mask=splits < n_splits, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf is NaN
    total = tl.sum(tl.math.exp2((lse - finite) * LOG2_E), axis=0)
    cols = tl.arange(0, BLOCK_D)
    o = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, n_splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S).to(tl.int64)  # [S]
        inside = part < n_splits
        part_lse = tl.load(partial_lse_ptr + part * n_rows + lse_row, mask=inside, other=float("-inf"))
        weight = tl.math.exp2((part_lse - finite) * LOG2_E)
        ptrs = partial_ptr + (part[:, None] * n_rows + row) * DV + cols[None, :]  # [S, D]
        partial = tl.load(ptrs, mask=inside[:, None] & (cols[None, :] < DV), other=0.0)
        o += tl.sum(weight[:, None] * partial, axis=0)
    o = o / tl.where(total > 0, total, 1.0)
    tl.store(o_ptr + row * DV + cols, o.to(o_ptr.dtype.element_ty), mask=cols < DV)
    tl.store(lse_ptr + lse_row, tl.where(total > 0, finite + tl.log2(total) * LN_2, float("-inf")))


def decode_attention(
    q: Tensor,
    cache: Cache,
    seqlen_new: int,
    *,
    rotary: Rotary | None,
    rotary_by_token: bool,
    slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    left: int,
    right: int,
    n_splits: int,
) -> tuple[Tensor, Tensor]:
    """Computes attention over the cache: o in q's dtype, and lse in fp32.

    Args:
        q: (batch, seqlen_q, n_heads, head_dim).
        cache: holds `seqlens + seqlen_new` tokens of each sequence.
        rotary_by_token: whether query i is rotated to position `seqlens + i`. If rotary_by_token is False, all queries
            are rotated to position `seqlens`.
        slopes: the ALiBi slopes, (n_heads,) or (batch, n_heads) fp32; the last stride is 1. None means no ALiBi.
        left, right: how many keys a query sees to the left and right of its aligned key; -1 means all.
        n_splits: the number of parts into which keys are split, or 0 to let `choose_splits` decide.

    Returns:
        o (batch, seqlen_q, n_heads, v_head_dim), lse (batch, n_heads, seqlen_q).
    """
    batch, seqlen_q, n_heads, head_dim = q.shape
    n_pages, page_size, n_kv_heads, v_head_dim = cache.v.shape
    o = torch.empty(batch, seqlen_q, n_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, seqlen_q, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    group = n_heads // n_kv_heads
    rows = seqlen_q * group
    limit = 0 if interpreted() else shared_memory(q.device)  # the interpreter does not limit shared memory
    tiles = decode_tiles(arch_of(q.device), head_dim, v_head_dim, q.element_size(), rows, cache.paged, limit)
    # A block of keys must not extend over two pages.
    block_n = min(tiles.block_n, page_size & -page_size) if cache.paged else tiles.block_n
    n_tiles = triton.cdiv(rows, tiles.block_m)
    unbounded = cache.capacity + seqlen_q
    left, right = (unbounded if side < 0 else min(side, unbounded) for side in (left, right))
    n_programs = batch * n_kv_heads * n_tiles
    if n_splits == 0:
        longest = min(cache.capacity, left + right + triton.cdiv(tiles.block_m, group))
        n_splits = choose_splits(n_programs, longest, 1 if interpreted() else multiprocessors(q.device))
    if n_splits > 1:
        partial = torch.empty(n_splits, *o.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(n_splits, *lse.shape, dtype=torch.float32, device=q.device)
    else:
        partial, partial_lse = o, lse
    _decode_kernel[(n_programs * n_splits,)](
        q, cache.k, cache.v, partial, partial_lse, cache.seqlens, cache.leftpad, cache.table, slopes,
        *angles_of(rotary), *q.stride()[:3], *cache.k.stride()[:3], *cache.v.stride()[:3],
        stride_of(cache.table), slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        stride_of(rotary.cos if rotary else None),
        batch, seqlen_q, seqlen_new, n_kv_heads, n_pages, page_size, cache.capacity, n_tiles, n_splits, left, right,
        positions_of(rotary), softmax_scale, softcap,
        PAGED=cache.paged, HAS_SOFTCAP=softcap != 0.0, **rotary_switches(rotary), ROTARY_BY_TOKEN=rotary_by_token,
        GROUP=group,
        D=head_dim, BLOCK_D=padded_width(head_dim), DV=v_head_dim, BLOCK_DV=padded_width(v_head_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=block_n, PRECISION=precision_of(q),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **OPTIONS,
    )  # fmt: skip
    if n_splits > 1:
        _merge_splits(partial, partial_lse, o, lse)
    return o, lse


def _merge_splits(partial: Tensor, partial_lse: Tensor, o: Tensor, lse: Tensor) -> None:
    """Merges the partial outputs (n_splits, *o.shape) and their lse into o and lse."""
    n_splits, (seqlen_q, n_heads, v_head_dim) = partial.shape[0], o.shape[1:]
    n_rows = lse.numel()
    _merge_kernel[(n_rows,)](
        partial, partial_lse, o, lse, seqlen_q, n_heads, n_rows, n_splits,
        DV=v_head_dim, BLOCK_D=triton.next_power_of_2(v_head_dim), MAX_SPLITS=MAX_SPLITS, BLOCK_S=16, **OPTIONS,
    )  # fmt: skip


def padded_width(width: int) -> int:
    """Returns the width of the block that holds a head: a power of two, and at least 16, the minimum of tl.dot."""
    return max(16, triton.next_power_of_2(width))


def decode_tiles(
    arch: Arch, head_dim: int, v_head_dim: int, itemsize: int, n_rows: int, paged: bool, limit: int
) -> TileConfig:
    """Returns the tile sizes for n_rows rows of a KV head.

    If n_rows is small, the tiles have few rows. If n_rows is large, the tiles are those of the forward pass.

    limit: the bytes of shared memory that a program can use.
    """
    if arch == "interpreter":
        # The interpreter uses small tiles, so that short inputs have several tiles.
        return TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    block_m = max(16, triton.next_power_of_2(n_rows))
    head_dim, v_head_dim = padded_width(head_dim), padded_width(v_head_dim)
    widest = max(head_dim, v_head_dim)
    if block_m > 64 or block_m * widest * itemsize > 64 * 128 * 2:
        tiles = tile_config(arch, widest, "fwd", itemsize)
    else:
        # In 16-bit dtypes a stage holds at most 32 KiB of K and V, so that two or more programs fit on an SM.
        block_n = 16 if itemsize == 4 else 64 if widest <= 128 else 32
        tiles = TileConfig(block_m, block_n, num_warps=4, num_stages=3 if block_m < 64 else 2)
    tiles = fit(arch, tiles, head_dim, v_head_dim, "fwd", itemsize, limit)
    # A paged cache needs more stages, because the pipeline first loads the page's number, then the block.
    return replace(tiles, num_stages=2 * tiles.num_stages - 1) if paged else tiles


def choose_splits(n_programs: int, n_keys: int, n_multiprocessors: int) -> int:
    """Returns the number of splits.

    There should be about two programs per multiprocessor, and at least `MIN_SPLIT` keys per split.

    n_keys: an upper bound on the number of keys that a tile sees. The host does not know the exact number of keys.
    """
    return max(1, min(2 * n_multiprocessors // n_programs, n_keys // MIN_SPLIT, MAX_SPLITS))
