"""The forward pass: an online softmax over blocks of keys, for each tile of queries (arXiv:2307.08691, algorithm 1).

attention_forward launches _fwd_kernel with one program for each tile of BLOCK_M queries of a head. The program calls
forward_tile, which loads the queries and stores o and lse. In between, `_attend` loops over blocks of BLOCK_N keys.
The kernels in this folder have arguments with these names:

    stride_qt, stride_qh    elements from one token of q to the next, and from one head of q to the next
    D, DV                   the head_dim of q and k, and the head_dim of v
    D_COLUMNS, DV_COLUMNS   the widths of the column blocks of a head (columns.py)
    GROUP                   the number of query heads that share one KV head
    head, head_64           the index of a head, as int32 and as int64. Offsets in tensors can exceed 2**31
    start, whole_start, whole_end, end   the bounds of the keys that a tile visits (masks.tile_range)
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.columns_of_head import columns_of
from fa_kernels.device import LN_2, LOG2_E
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.masks import is_visible, tile_range
from fa_kernels.flash_attention.portable.columns import (
    add_to_rescaled,
    in_fp16,
    isolate_nan_columns,
    load_block,
    load_columns,
    store_block,
    zero_columns,
)
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import alibi_bias, cap, load_alibi
from fa_kernels.flash_attention.softmax import online_softmax_step
from fa_kernels.flash_attention.tile_order import grid_of_tiles, heads_per_section, tile_and_head
from fa_kernels.flash_attention.tiles import TileConfig, launch_tiles, precision_of
from fa_kernels.launch.record import launch


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_ptr, v_ptr, start, end, key_start, key_end, total_k, stride_kt, stride_vt,
    softmax_scale, softcap, slope, aligned,
    MASKED: tl.constexpr, ISOLATE_NAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates the running softmax of one tile of queries with the keys from `start` to `end - 1`."""
    for n in range(start, end, BLOCK_N):
        scores = None
        for i in tl.static_range(len(D_COLUMNS)):
            k = load_block(k_ptr, n, stride_kt, total_k, i, D_COLUMNS, D, BLOCK_N, MASKED)  # [N, D_COLUMNS[i]]
            scores = tl.dot(q[i], tl.trans(k), scores, input_precision=PRECISION)  # [M, N]
        keys = n + tl.arange(0, BLOCK_N)
        to_log2 = softmax_scale * LOG2_E  # exp(softmax_scale * scores) is exp2(to_log2 * scores)
        if HAS_SOFTCAP:  # the soft cap and ALiBi return scores that are already scaled, in log2 units
            scores = cap(scores, softmax_scale, softcap, q[0].dtype)[0]
            to_log2 = 1.0
        if HAS_ALIBI:
            scores = scores * to_log2 + alibi_bias(slope[:, None], aligned[:, None], keys[None, :])
            to_log2 = 1.0
        if MASKED:
            scores = tl.where(is_visible(keys, key_start, key_end), scores, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax_step(scores, row_max, row_sum, to_log2, MASKED)
        v = load_columns(v_ptr, n, stride_vt, total_k, DV_COLUMNS, DV, BLOCK_N, MASKED)
        if v_ptr.dtype.element_ty == tl.float8e4nv:
            v = in_fp16(v)  # fp16 represents fp8 values exactly, and rounds p to 11 significant bits instead of 4
        if ISOLATE_NAN:
            v, nan_rows = isolate_nan_columns(v)
            p = tl.where(p > 0, p + nan_rows[None, :], p)
        p = p.to(v[0].dtype)
        acc = add_to_rescaled(acc, rescale, p, v, PRECISION)
    return acc, row_max, row_sum


@triton.jit
def forward_tile(
    first, head,
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
    sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """Computes attention of BLOCK_M queries of one head, starting with query `first`.

    `first` must be below total_q.

    Heads of q and k have D columns, in blocks of D_COLUMNS. Heads of v have DV columns, in blocks of DV_COLUMNS
    (columns.py).
    With `PHASES=3`, three loops process the blocks of keys, and only the first and the last loop use a mask. With
    `PHASES=1`, one loop processes all blocks with a mask, which makes the compiled code shorter. Without `ISOLATE_NAN`,
    NaN in one document can reach all rows of the tile.
    """
    rows = first + tl.arange(0, BLOCK_M)  # [M]
    inside = rows < total_q
    key_start = tl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = tl.load(key_end_ptr + rows, mask=inside, other=0)
    last = tl.minimum(first + BLOCK_M, total_q) - 1
    start, whole_start, whole_end, end = tile_range(key_start_ptr, key_end_ptr, first, last, BLOCK_N)
    if PHASES == 1:
        whole_start = end  # no block counts as whole, so phase 0 processes all blocks

    if descale_ptr is not None:
        softmax_scale = softmax_scale * tl.load(descale_ptr + head)
    head_64 = head.to(tl.int64)
    q_ptr += head_64 * stride_qh
    k_ptr += head_64 // GROUP * stride_kh
    v_ptr += head_64 // GROUP * stride_vh
    q = load_columns(q_ptr, first, stride_qt, total_q, D_COLUMNS, D, BLOCK_M, True)
    slope, aligned = load_alibi(slopes_ptr, aligned_ptr, document_ptr, stride_slopes, rows, head, inside, HAS_ALIBI)

    acc = zero_columns(DV_COLUMNS, BLOCK_M)
    if HAS_SINKS:  # every row sees the sink, which is a score without a row in v
        row_max = tl.full([BLOCK_M], LOG2_E, tl.float32) * tl.load(sinks_ptr + head)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Phases 0 and 2 process the blocks at both ends of the range of keys, which need a mask. Every row sees all keys
    # that phase 1 processes.
    for phase in tl.static_range(PHASES):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_ptr, v_ptr,
            start if phase == 0 else whole_start if phase == 1 else whole_end,
            whole_start if phase == 0 else whole_end if phase == 1 else end,
            key_start, key_end, total_k, stride_kt, stride_vt, softmax_scale, softcap, slope, aligned,
            phase != 1, phase != 1 and ISOLATE_NAN, HAS_SOFTCAP, HAS_ALIBI, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_N,
            PRECISION,
        )  # fmt: skip

    sees = row_sum != 0  # true for NaN too. Rows that see no key get o = 0 and lse = -inf
    divisor = tl.where(sees, row_sum, 1.0)[:, None]
    if descale_ptr is not None:
        divisor = divisor / tl.load(descale_ptr + n_heads + head)
    lse = tl.where(sees, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
    stride_ot = n_heads * DV
    o_ptr += head_64 * DV
    for i in tl.static_range(len(DV_COLUMNS)):
        store_block(o_ptr, acc[i] / divisor, first, stride_ot, total_q, i, DV_COLUMNS, DV, BLOCK_M)
    tl.store(lse_ptr + head_64 * total_q + rows, lse, mask=inside)


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads", "n_tiles", "section"])
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
    sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap, tiles_ptr, n_tiles, section,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    TILES_PER_WORK_TILE: tl.constexpr,
):  # fmt: skip
    """One program computes attention of BLOCK_M queries of one head.

    o (total_q, n_heads, DV) and lse (n_heads, total_q) are contiguous.
    """
    tile, head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_heads, section, TILES_PER_WORK_TILE)
    first = tile * BLOCK_M
    if first >= total_q:
        return
    forward_tile(
        first, head,
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
        sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
        total_q, total_k, n_heads, softmax_scale, softcap,
        HAS_SINKS, HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_M, BLOCK_N, PRECISION,
        ISOLATE_NAN, 3,
    )  # fmt: skip


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Computes attention: o in out_dtype, and lse in fp32.

    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim) -> o
    (total_q, n_heads, v_head_dim), lse (n_heads, total_q).
    """
    total_q, n_heads, head_dim = q.shape
    o = torch.empty(total_q, n_heads, v.shape[2], dtype=out_dtype, device=q.device)
    lse = torch.empty(n_heads, total_q, dtype=torch.float32, device=q.device)
    tiles = launch_tiles(q.device, head_dim, v.shape[2], "fwd", q.element_size())
    grid, n_tiles = grid_of_tiles(schedule.query_tiles, n_heads, tiles.block_m)
    if grid:
        launch(
            _fwd_kernel, (grid,),
            *forward_arguments(q, k, v, o, lse, schedule, features),
            schedule.query_tiles, n_tiles, heads_per_section(k, v, n_heads),
            **forward_constants(q, v, features, tiles), ISOLATE_NAN=schedule.crosses_documents,
            TILES_PER_WORK_TILE=WORK_TILE // tiles.block_m, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return o, lse


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, schedule: Schedule, features: Features
) -> tuple[Any, ...]:
    """Returns the arguments that the forward kernel and its repair kernel (repair.py) share."""
    return (
        q, k, v, o, lse, schedule.key_start, schedule.key_end, *features.pointers(), features.descale,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], features.stride_slopes(),
        q.shape[0], k.shape[0], q.shape[1], features.softmax_scale, features.softcap,
    )  # fmt: skip


def forward_constants(q: Tensor, v: Tensor, features: Features, tiles: TileConfig) -> dict[str, Any]:
    """Returns the constexpr arguments that the forward kernel and its repair kernel share."""
    return dict(
        HAS_SINKS=features.sinks is not None, HAS_SOFTCAP=features.softcap != 0.0, HAS_ALIBI=bool(features.alibi),
        GROUP=q.shape[1] // v.shape[1],
        D=q.shape[2], D_COLUMNS=columns_of(q.shape[2], q.element_size()),
        DV=v.shape[2], DV_COLUMNS=columns_of(v.shape[2], v.element_size()),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION=precision_of(q),
    )  # fmt: skip
