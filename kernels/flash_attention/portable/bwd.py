"""The backward pass by recomputation: dK and dV a tile of keys at a time, then dQ a tile of queries at a time.

Two kernels recompute the scores twice (seven matmuls where one fused pass needs five), but each output has one owner:
no atomics, and gradients are bitwise repeatable (arXiv:2307.08691, Alg. 2, with its loops taken apart).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.masks import is_visible, tile_range
from kernels.flash_attention.portable.launch import grid_of_tiles, heads_per_section, precision_of, tile_and_head
from kernels.flash_attention.schedule import WORK_TILE, Schedule
from kernels.flash_attention.tiles import arch_of, tile_config

LOG2_E = 1.4426950408889634


@triton.jit
def _accumulate_dk_dv(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start, end, query_start, query_end, total_q, scale_log2,
    stride_qt, stride_dot, cols_qk, cols_v,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the queries start to end of one head into dK and dV of one tile of keys. Scores are held transposed."""
    block = tl.arange(0, BLOCK_M)  # [M]
    # int64 for a block's base: 1M tokens x 32 heads x 128 is past 2**31
    base_qt, base_dot = stride_qt.to(tl.int64), stride_dot.to(tl.int64)
    for m in range(start, end, BLOCK_M):
        q_ptrs = q_ptr + m * base_qt + block[:, None] * stride_qt + cols_qk[None, :]  # [M, D]
        do_ptrs = do_ptr + m * base_dot + block[:, None] * stride_dot + cols_v[None, :]  # [M, DV]
        queries = m + block
        if MASKED:
            inside = queries < total_q
            q = tl.load(q_ptrs, mask=inside[:, None] & (cols_qk[None, :] < HEAD_DIM), other=0.0)
            do = tl.load(do_ptrs, mask=inside[:, None] & (cols_v[None, :] < V_HEAD_DIM), other=0.0)
            lse = tl.load(lse_ptr + queries, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + queries, mask=inside, other=0.0)
        else:
            q = tl.load(q_ptrs, mask=cols_qk[None, :] < HEAD_DIM, other=0.0) if BLOCK_D != HEAD_DIM else tl.load(q_ptrs)
            if BLOCK_DV != V_HEAD_DIM:
                do = tl.load(do_ptrs, mask=cols_v[None, :] < V_HEAD_DIM, other=0.0)
            else:
                do = tl.load(do_ptrs)
            lse = tl.load(lse_ptr + queries)
            delta = tl.load(delta_ptr + queries)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [N, M]
        p = tl.math.exp2(scores * scale_log2 - (lse * 1.4426950408889634)[None, :])
        if MASKED:
            # selected after the exponential: a row that sees nothing has lse = -inf
            p = tl.where(is_visible(queries, query_start, query_end), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [N, M]
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["total_q", "total_k", "n_kv_heads", "n_tiles", "section"])
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_start_ptr, query_end_ptr, tiles_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    total_q, total_k, n_kv_heads, n_tiles, section, softmax_scale, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one KV head, over all query heads that share it. dk and dv are dense."""
    tile, kv_head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_kv_heads, section, PARTS)
    first = tile * BLOCK_N
    if first >= total_k:
        return
    last = tl.minimum(first + BLOCK_N, total_k) - 1
    rows = first + tl.arange(0, BLOCK_N)  # [N]
    cols_qk = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    inside = rows < total_k
    mask_qk = inside[:, None] & (cols_qk[None, :] < HEAD_DIM)
    mask_v = inside[:, None] & (cols_v[None, :] < V_HEAD_DIM)
    query_start = tl.load(query_start_ptr + rows, mask=inside, other=0)
    query_end = tl.load(query_end_ptr + rows, mask=inside, other=0)
    start, whole_start, whole_end, end = tile_range(query_start_ptr, query_end_ptr, first, last, BLOCK_M)

    rows_64 = rows[:, None].to(tl.int64)
    k = tl.load(k_ptr + rows_64 * stride_kt + kv_head.to(tl.int64) * stride_kh + cols_qk[None, :], mask_qk, other=0.0)
    v = tl.load(v_ptr + rows_64 * stride_vt + kv_head.to(tl.int64) * stride_vh + cols_v[None, :], mask_v, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = (kv_head * GROUP + member).to(tl.int64)
        q_head, do_head = q_ptr + head * stride_qh, do_ptr + head * stride_doh
        lse_head, delta_head = lse_ptr + head * total_q, delta_ptr + head * total_q
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_head, do_head, lse_head, delta_head, start, whole_start, query_start, query_end,
            total_q, scale_log2, stride_qt, stride_dot, cols_qk, cols_v,
            True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, PRECISION,
        )  # fmt: skip
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_head, do_head, lse_head, delta_head, whole_start, whole_end, query_start, query_end,
            total_q, scale_log2, stride_qt, stride_dot, cols_qk, cols_v,
            False, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, PRECISION,
        )  # fmt: skip
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_head, do_head, lse_head, delta_head, whole_end, end, query_start, query_end,
            total_q, scale_log2, stride_qt, stride_dot, cols_qk, cols_v,
            True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, PRECISION,
        )  # fmt: skip
    out_rows = rows_64 * n_kv_heads + kv_head
    dk_ptrs = dk_ptr + out_rows * HEAD_DIM + cols_qk[None, :]
    tl.store(dk_ptrs, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=mask_qk)
    tl.store(dv_ptr + out_rows * V_HEAD_DIM + cols_v[None, :], dv.to(dv_ptr.dtype.element_ty), mask=mask_v)


@triton.jit
def _accumulate_dq(
    dq, q, do, lse_log2, delta, k_ptr, v_ptr, start, end, key_start, key_end, total_k, scale_log2,
    stride_kt, stride_vt, cols_qk, cols_v,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the keys start to end into dQ of one tile of queries."""
    block = tl.arange(0, BLOCK_N)  # [N]
    base_kt, base_vt = stride_kt.to(tl.int64), stride_vt.to(tl.int64)
    for n in range(start, end, BLOCK_N):
        k_ptrs = k_ptr + n * base_kt + block[:, None] * stride_kt + cols_qk[None, :]  # [N, D]
        v_ptrs = v_ptr + n * base_vt + block[:, None] * stride_vt + cols_v[None, :]  # [N, DV]
        keys = n + block
        if MASKED or BLOCK_D != HEAD_DIM:
            k = tl.load(k_ptrs, mask=(keys[:, None] < total_k) & (cols_qk[None, :] < HEAD_DIM), other=0.0)
        else:
            k = tl.load(k_ptrs)
        if MASKED or BLOCK_DV != V_HEAD_DIM:
            v = tl.load(v_ptrs, mask=(keys[:, None] < total_k) & (cols_v[None, :] < V_HEAD_DIM), other=0.0)
        else:
            v = tl.load(v_ptrs)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        p = tl.math.exp2(scores * scale_log2 - lse_log2[:, None])
        if MASKED:
            p = tl.where(is_visible(keys, key_start, key_end), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [M, N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads", "n_tiles", "section"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, key_start_ptr, key_end_ptr, tiles_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    total_q, total_k, n_heads, n_tiles, section, softmax_scale, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. dq is (total_q, n_heads, HEAD_DIM), dense."""
    tile, head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_heads, section, PARTS)
    first = tile * BLOCK_M
    if first >= total_q:
        return
    last = tl.minimum(first + BLOCK_M, total_q) - 1
    rows = first + tl.arange(0, BLOCK_M)  # [M]
    cols_qk = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    inside = rows < total_q
    mask_qk = inside[:, None] & (cols_qk[None, :] < HEAD_DIM)
    key_start = tl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = tl.load(key_end_ptr + rows, mask=inside, other=0)
    start, whole_start, whole_end, end = tile_range(key_start_ptr, key_end_ptr, first, last, BLOCK_N)

    rows_64 = rows[:, None].to(tl.int64)
    head_64 = head.to(tl.int64)
    q = tl.load(q_ptr + rows_64 * stride_qt + head_64 * stride_qh + cols_qk[None, :], mask_qk, other=0.0)
    do_ptrs = do_ptr + rows_64 * stride_dot + head_64 * stride_doh + cols_v[None, :]
    do = tl.load(do_ptrs, mask=inside[:, None] & (cols_v[None, :] < V_HEAD_DIM), other=0.0)
    lse_log2 = tl.load(lse_ptr + head_64 * total_q + rows, mask=inside, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + head_64 * total_q + rows, mask=inside, other=0.0)
    k_ptr += (head_64 // GROUP) * stride_kh
    v_ptr += (head_64 // GROUP) * stride_vh
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, start, whole_start, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, whole_start, whole_end, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        False, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, whole_end, end, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq_ptrs = dq_ptr + (rows_64 * n_heads + head) * HEAD_DIM + cols_qk[None, :]
    tl.store(dq_ptrs, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=mask_qk)


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, schedule: Schedule, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """do like o, lse and delta (n_heads, total_q) fp32 -> dq, dk, dv, dense, in the dtype of q, k, v."""
    total_q, n_heads, head_dim = q.shape
    total_k, n_kv_heads, v_head_dim = v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    block_d = triton.next_power_of_2(head_dim)
    block_dv = triton.next_power_of_2(v_head_dim)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
    scales = (softmax_scale, softmax_scale * LOG2_E)
    section = heads_per_section(k, v, n_heads)
    sizes = dict(
        GROUP=n_heads // n_kv_heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
        PRECISION=precision_of(q),
    )  # fmt: skip

    tiles = tile_config(arch_of(q.device), max(block_d, block_dv), "dkdv", q.element_size())
    grid, n_tiles = grid_of_tiles(schedule.key_tiles, n_kv_heads, tiles.block_n)
    if grid:
        _dkdv_kernel[(grid,)](
            q, k, v, do, lse, delta, dk, dv, schedule.query_start, schedule.query_end, schedule.key_tiles, *strides,
            total_q, total_k, n_kv_heads, n_tiles, max(1, section * n_kv_heads // n_heads), *scales,
            **sizes, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PARTS=WORK_TILE // tiles.block_n,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    tiles = tile_config(arch_of(q.device), max(block_d, block_dv), "dq", q.element_size())
    grid, n_tiles = grid_of_tiles(schedule.query_tiles, n_heads, tiles.block_m)
    if grid:
        _dq_kernel[(grid,)](
            q, k, v, do, lse, delta, dq, schedule.key_start, schedule.key_end, schedule.query_tiles, *strides,
            total_q, total_k, n_heads, n_tiles, section, *scales,
            **sizes, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PARTS=WORK_TILE // tiles.block_m,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return dq, dk, dv
