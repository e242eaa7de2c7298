"""Recomputes tiles in which the Hopper kernels found NaN, because the NaN may have come from another document.

The portable kernels isolate NaN while they compute. The Hopper kernels only write one NaN mark for every 64 rows
(nan_isolation.py). If the mark of any row of a tile is 1, the functions of forward.py and backward.py compute the tile
again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div, interpreted, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.nan_isolation import any_is_marked, is_marked
from fa_kernels.flash_attention.portable.backward import backward_arguments, backward_constants, dkdv_tile, dq_tile
from fa_kernels.flash_attention.portable.forward import forward_arguments, forward_constants, forward_tile
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.tiles import launch_tiles
from fa_kernels.launch.record import launch


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads"])
def _repair_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
    sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap, marks_ptr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Computes o and lse again for marked tiles of BLOCK_M queries.

    A program reads the NaN marks of `LOOK` tiles at a time.
    """
    n_tiles = tl.cdiv(total_q, BLOCK_M)
    n_items, step = n_tiles * n_heads, tl.num_programs(0)
    for base in tl.range(tl.program_id(0), n_items, step * LOOK, disable_licm=True):
        if any_is_marked(marks_ptr, base, n_items, n_tiles, total_q, BLOCK_M, LOOK):
            for item in tl.range(base, tl.minimum(base + step * LOOK, n_items), step, disable_licm=True):
                head, first = item // n_tiles, item % n_tiles * BLOCK_M
                if is_marked(marks_ptr, head, first, total_q, BLOCK_M):
                    forward_tile(
                        first, head,
                        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr,
                        sinks_ptr, slopes_ptr, aligned_ptr, document_ptr, descale_ptr,
                        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_slopes,
                        total_q, total_k, n_heads, softmax_scale, softcap,
                        HAS_SINKS, HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_M, BLOCK_N,
                        PRECISION, True, 1,
                    )  # fmt: skip


def repair_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, marks: Tensor, schedule: Schedule, features: Features
) -> None:
    """Computes o and lse again, in place, for the tiles that are marked in `marks` (nan_isolation.new_marks).

    o and lse are contiguous.
    """
    total_q, n_heads, head_dim = q.shape
    tiles = launch_tiles(q.device, head_dim, v.shape[2], "fwd", q.element_size())
    programs, look = repair_grid(q.device, ceil_div(total_q, tiles.block_m) * n_heads)
    if programs:
        launch(
            _repair_fwd_kernel, (programs,),
            *forward_arguments(q, k, v, o, lse, schedule, features), marks,
            **forward_constants(q, v, features, tiles), LOOK=look, num_warps=tiles.num_warps, num_stages=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads"])
def _repair_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    key_start_ptr, key_end_ptr, query_start_ptr, query_end_ptr,
    slopes_ptr, aligned_ptr, document_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap, marks_q_ptr, marks_k_ptr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, DKDV_M: tl.constexpr, DKDV_N: tl.constexpr, DQ_M: tl.constexpr, DQ_N: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV again for marked tiles of DKDV_N keys, then dQ for marked tiles of DQ_M queries.

    If marks_k_ptr is None, dK and dV are not computed. If marks_q_ptr is None, dQ is not computed.
    """
    n_kv_heads, step = n_heads // GROUP, tl.num_programs(0)
    if marks_k_ptr is not None:
        n_tiles = tl.cdiv(total_k, DKDV_N)
        n_items = n_tiles * n_kv_heads
        for base in tl.range(tl.program_id(0), n_items, step * LOOK, disable_licm=True):
            if any_is_marked(marks_k_ptr, base, n_items, n_tiles, total_k, DKDV_N, LOOK):
                for item in tl.range(base, tl.minimum(base + step * LOOK, n_items), step, disable_licm=True):
                    kv_head, first = item // n_tiles, item % n_tiles * DKDV_N
                    if is_marked(marks_k_ptr, kv_head, first, total_k, DKDV_N):
                        dkdv_tile(
                            first, kv_head,
                            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                            query_start_ptr, query_end_ptr,
                            slopes_ptr, aligned_ptr, document_ptr,
                            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
                            stride_slopes, total_q, total_k, n_kv_heads, softmax_scale, softcap,
                            True, True, HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, DKDV_M, DKDV_N,
                            PRECISION, True, 1,
                        )  # fmt: skip
    if marks_q_ptr is not None:
        n_tiles = tl.cdiv(total_q, DQ_M)
        n_items = n_tiles * n_heads
        for base in tl.range(tl.program_id(0), n_items, step * LOOK, disable_licm=True):
            if any_is_marked(marks_q_ptr, base, n_items, n_tiles, total_q, DQ_M, LOOK):
                for item in tl.range(base, tl.minimum(base + step * LOOK, n_items), step, disable_licm=True):
                    head, first = item // n_tiles, item % n_tiles * DQ_M
                    if is_marked(marks_q_ptr, head, first, total_q, DQ_M):
                        dq_tile(
                            first, head,
                            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, key_start_ptr, key_end_ptr,
                            slopes_ptr, aligned_ptr, document_ptr,
                            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
                            stride_slopes, total_q, total_k, n_heads, softmax_scale, softcap,
                            HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, DQ_M, DQ_N, PRECISION, True, 1,
                        )  # fmt: skip


def repair_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, of_queries: tuple[Tensor, Tensor] | None,
    of_keys: tuple[Tensor, Tensor, Tensor] | None, schedule: Schedule, features: Features,
) -> None:  # fmt: skip
    """Computes gradients again, in place, for the tiles that are marked (nan_isolation.new_marks).

    of_queries: dq and the NaN marks of dq, or None to leave out dq. of_keys: dk, dv and their common NaN marks, or None
    to leave out dk and dv. dq, dk and dv are contiguous.
    """
    (total_q, n_heads, head_dim), (total_k, n_kv_heads, v_head_dim) = q.shape, v.shape
    dkdv_tiles = launch_tiles(q.device, head_dim, v_head_dim, "dkdv", q.element_size())
    dq_tiles = launch_tiles(q.device, head_dim, v_head_dim, "dq", q.element_size())
    n_items = max(ceil_div(total_k, dkdv_tiles.block_n) * n_kv_heads, ceil_div(total_q, dq_tiles.block_m) * n_heads)
    dq, marks_q = of_queries or (None, None)
    dk, dv, marks_k = of_keys or (None, None, None)
    programs, look = repair_grid(q.device, n_items)
    if programs:
        launch(
            _repair_bwd_kernel, (programs,),
            q, k, v, do, lse, delta, dq, dk, dv,
            schedule.key_start, schedule.key_end, schedule.query_start, schedule.query_end,
            *backward_arguments(q, k, v, do, n_heads, features), marks_q, marks_k,
            **backward_constants(q, v, features),
            DKDV_M=dkdv_tiles.block_m, DKDV_N=dkdv_tiles.block_n, DQ_M=dq_tiles.block_m, DQ_N=dq_tiles.block_n,
            LOOK=look, num_warps=max(dkdv_tiles.num_warps, dq_tiles.num_warps), num_stages=1,
        )  # fmt: skip


def repair_grid(device: torch.device, n_items: int) -> tuple[int, int]:
    """Returns two numbers: how many programs check `n_items` tiles, and how many tiles a program checks at a time.

    There is at most one program per multiprocessor. Usually no tile has a NaN mark, so a launch that
    finds no mark must be fast.
    """
    if interpreted():
        return min(n_items, 3), 4  # small numbers, so that each program checks several tiles even if inputs are short
    return min(n_items, multiprocessors(device)), 256
