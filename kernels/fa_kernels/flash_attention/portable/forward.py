"""The forward pass: tiles of queries, an online softmax over blocks of keys (arXiv:2307.08691, Alg. 1)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.masks import is_visible, tile_range
from fa_kernels.flash_attention.nan_isolation import isolate_nan
from fa_kernels.flash_attention.portable.load import load_part, store_part
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import alibi_bias, cap, load_alibi
from fa_kernels.flash_attention.softmax import online_softmax_step
from fa_kernels.flash_attention.tile_order import grid_of_tiles, heads_per_section, tile_and_head
from fa_kernels.flash_attention.tiles import TileConfig, launch_tiles, precision_of
from fa_kernels.launch.record import launch


@triton.jit
def _attend(
    acc, acc_2, row_max, row_sum, q, q_2, k_ptr, v_ptr, start, end, key_start, key_end, total_k, stride_kt, stride_vt,
    softmax_scale, softcap, slope, aligned,
    MASKED: tl.constexpr, ISOLATE_NAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    D: tl.constexpr,
    D_1: tl.constexpr, D_2: tl.constexpr, DV: tl.constexpr, DV_1: tl.constexpr, DV_2: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the keys start to end into the running softmax of one tile of queries."""
    for n in range(start, end, BLOCK_N):
        k = load_part(k_ptr, n, stride_kt, total_k, 0, D_1, D, BLOCK_N, MASKED)  # [N, D_1]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        if D_2:
            k_2 = load_part(k_ptr, n, stride_kt, total_k, D_1, D_2, D, BLOCK_N, MASKED)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision=PRECISION)
        keys = n + tl.arange(0, BLOCK_N)
        to_log2 = softmax_scale * LOG2_E
        if HAS_SOFTCAP:
            scores, _ = cap(scores, softmax_scale, softcap, k.dtype)
            to_log2 = 1.0
        if HAS_ALIBI:
            scores = scores * to_log2 + alibi_bias(slope[:, None], aligned[:, None], keys[None, :])
            to_log2 = 1.0
        if MASKED:
            scores = tl.where(is_visible(keys, key_start, key_end), scores, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax_step(scores, row_max, row_sum, to_log2, MASKED)
        v = load_part(v_ptr, n, stride_vt, total_k, 0, DV_1, DV, BLOCK_N, MASKED)  # [N, DV_1]
        v_2 = load_part(v_ptr, n, stride_vt, total_k, DV_1, DV_2, DV, BLOCK_N, MASKED) if DV_2 else v
        if v_ptr.dtype.element_ty == tl.float8e4nv:  # exact in fp16, in which p keeps 11 bits instead of 4
            v, v_2 = v.to(tl.float16), v_2.to(tl.float16)
        if ISOLATE_NAN:
            v, nan_rows = isolate_nan(v)
            if DV_2:
                v_2, nan_rows_2 = isolate_nan(v_2)
                nan_rows += nan_rows_2
            p = tl.where(p > 0, p + nan_rows[None, :], p)
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
        if DV_2:
            acc_2 = tl.dot(p, v_2, acc_2 * rescale[:, None], input_precision=PRECISION)
    return acc, acc_2, row_max, row_sum


@triton.jit
def forward_tile(
    first, head,
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
    sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, DV: tl.constexpr, DV_1: tl.constexpr, DV_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """The attention of BLOCK_M queries of one head, from `first` on, which is one of them.

    A head of D columns is held as parts of D_1 and D_2 columns, and one of DV as DV_1 and DV_2; the second may be 0.
    In 3 phases, blocks that every row sees whole need no mask; in 1, all are masked, which takes the least code.
    ISOLATE_NAN keeps NaN in its document; without, it may reach all rows of the tile.
    """
    rows = first + tl.arange(0, BLOCK_M)  # [M]
    inside = rows < total_q
    key_start = tl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = tl.load(key_end_ptr + rows, mask=inside, other=0)
    last = tl.minimum(first + BLOCK_M, total_q) - 1
    start, whole_start, whole_end, end = tile_range(key_start_ptr, key_end_ptr, first, last, BLOCK_N)
    if PHASES == 1:
        whole_start = end

    if descale_ptr is not None:
        softmax_scale = softmax_scale * tl.load(descale_ptr + head)
    head_64 = head.to(tl.int64)
    q_ptr += head_64 * stride_qh
    k_ptr += head_64 // GROUP * stride_kh
    v_ptr += head_64 // GROUP * stride_vh
    q = load_part(q_ptr, first, stride_qt, total_q, 0, D_1, D, BLOCK_M, True)  # [M, D_1]
    q_2 = load_part(q_ptr, first, stride_qt, total_q, D_1, D_2, D, BLOCK_M, True) if D_2 else q
    slope, aligned = load_alibi(slopes_ptr, aligned_ptr, document_ptr, stride_slopes, rows, head, inside, HAS_ALIBI)

    acc = tl.zeros([BLOCK_M, DV_1], tl.float32)
    acc_2 = tl.zeros([BLOCK_M, DV_2 if DV_2 else 1], tl.float32)
    if HAS_SINKS:  # a logit that every row sees and that has no value
        row_max = tl.full([BLOCK_M], LOG2_E, tl.float32) * tl.load(sinks_ptr + head)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    # blocks that some row sees in part, then those that every row sees whole, then again in part
    for phase in tl.static_range(PHASES):
        acc, acc_2, row_max, row_sum = _attend(
            acc, acc_2, row_max, row_sum, q, q_2, k_ptr, v_ptr,
            start if phase == 0 else whole_start if phase == 1 else whole_end,
            whole_start if phase == 0 else whole_end if phase == 1 else end,
            key_start, key_end, total_k, stride_kt, stride_vt, softmax_scale, softcap, slope, aligned,
            phase != 1, phase != 1 and ISOLATE_NAN, HAS_SOFTCAP, HAS_ALIBI, D, D_1, D_2, DV, DV_1, DV_2, BLOCK_N,
            PRECISION,
        )  # fmt: skip

    sees = row_sum != 0  # NaN too; a row that sees no key gives 0 and -inf
    divisor = tl.where(sees, row_sum, 1.0)[:, None]
    if descale_ptr is not None:
        divisor = divisor / tl.load(descale_ptr + n_heads + head)
    lse = tl.where(sees, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    stride_ot = n_heads * DV
    o_ptr += head_64 * DV
    store_part(o_ptr, acc / divisor, first, stride_ot, total_q, 0, DV_1, DV, BLOCK_M)
    if DV_2:
        store_part(o_ptr, acc_2 / divisor, first, stride_ot, total_q, DV_1, DV_2, DV, BLOCK_M)
    tl.store(lse_ptr + head_64 * total_q + rows, lse, mask=inside)


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads", "n_tiles", "section"])
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
    sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap, tiles_ptr, n_tiles, section,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, DV: tl.constexpr, DV_1: tl.constexpr, DV_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    TILES_PER_WORK_TILE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. o (total_q, n_heads, DV) and lse (n_heads, total_q) are dense."""
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
        HAS_SINKS, HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_1, D_2, DV, DV_1, DV_2, BLOCK_M, BLOCK_N, PRECISION,
        ISOLATE_NAN, 3,
    )  # fmt: skip


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse fp32."""
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
    """What both kernels begin with."""
    return (
        q, k, v, o, lse, schedule.key_start, schedule.key_end, *features.pointers(), features.descale,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], features.stride_slopes(),
        q.shape[0], k.shape[0], q.shape[1], features.softmax_scale, features.softcap,
    )  # fmt: skip


def forward_constants(q: Tensor, v: Tensor, features: Features, tiles: TileConfig) -> dict[str, Any]:
    """What both are compiled with."""
    (d_1, d_2), (dv_1, dv_2) = (split_columns(x.shape[2], x.element_size()) for x in (q, v))
    return dict(
        **features.switches(), GROUP=q.shape[1] // v.shape[1],
        D=q.shape[2], D_1=d_1, D_2=d_2, DV=v.shape[2], DV_1=dv_1, DV_2=dv_2,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION=precision_of(q),
    )  # fmt: skip
