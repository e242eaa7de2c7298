"""The forward pass: tiles of queries, an online softmax over blocks of keys (arXiv:2307.08691, Alg. 1)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.masks import is_visible, tile_range
from kernels.flash_attention.portable.launch import grid_of_tiles, heads_per_section, precision_of, tile_and_head
from kernels.flash_attention.schedule import WORK_TILE, Schedule
from kernels.flash_attention.softmax import online_softmax_step
from kernels.flash_attention.tiles import arch_of, tile_config


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_ptr, v_ptr, start, end, key_start, key_end, total_k, scale_log2,
    stride_kt, stride_vt, cols_qk, cols_v,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the keys start to end into the running softmax of one tile of queries."""
    block = tl.arange(0, BLOCK_N)  # [N]
    # int64 for a block's base: 1M tokens x 32 heads x 128 is past 2**31
    base_kt, base_vt = stride_kt.to(tl.int64), stride_vt.to(tl.int64)
    for n in range(start, end, BLOCK_N):
        k_ptrs = k_ptr + n * base_kt + block[None, :] * stride_kt + cols_qk[:, None]  # [D, N]
        v_ptrs = v_ptr + n * base_vt + block[:, None] * stride_vt + cols_v[None, :]  # [N, DV]
        keys = n + block
        if MASKED or BLOCK_D != HEAD_DIM:
            k = tl.load(k_ptrs, mask=(keys[None, :] < total_k) & (cols_qk[:, None] < HEAD_DIM), other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k, input_precision=PRECISION)  # [M, N]
        if MASKED:
            scores = tl.where(is_visible(keys, key_start, key_end), scores, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax_step(scores, row_max, row_sum, scale_log2, MASKED)
        acc = acc * rescale[:, None]
        if MASKED or BLOCK_DV != V_HEAD_DIM:
            v = tl.load(v_ptrs, mask=(keys[:, None] < total_k) & (cols_v[None, :] < V_HEAD_DIM), other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads", "n_tiles", "section"])
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, key_start_ptr, key_end_ptr, tiles_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    total_q, total_k, n_heads, n_tiles, section, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. o (total_q, n_heads, V_HEAD_DIM), lse (n_heads, total_q), dense."""
    tile, head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_heads, section, PARTS)
    first = tile * BLOCK_M
    if first >= total_q:
        return
    last = tl.minimum(first + BLOCK_M, total_q) - 1
    rows = first + tl.arange(0, BLOCK_M)  # [M]
    cols_qk = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    inside = rows < total_q
    key_start = tl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = tl.load(key_end_ptr + rows, mask=inside, other=0)
    start, whole_start, whole_end, end = tile_range(key_start_ptr, key_end_ptr, first, last, BLOCK_N)

    q_ptrs = q_ptr + rows[:, None].to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh + cols_qk[None, :]
    q = tl.load(q_ptrs, mask=inside[:, None] & (cols_qk[None, :] < HEAD_DIM), other=0.0)  # [M, D]
    k_ptr += (head // GROUP).to(tl.int64) * stride_kh
    v_ptr += (head // GROUP).to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, start, whole_start, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, whole_start, whole_end, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        False, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, whole_end, end, key_start, key_end, total_k, scale_log2,
        stride_kt, stride_vt, cols_qk, cols_v,
        True, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION,
    )  # fmt: skip

    sees = row_sum > 0  # a row that sees no key gives 0 and -inf
    acc = acc / tl.where(sees, row_sum, 1.0)[:, None]
    lse = tl.where(sees, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    o_ptrs = o_ptr + (rows[:, None].to(tl.int64) * n_heads + head) * V_HEAD_DIM + cols_v[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=inside[:, None] & (cols_v[None, :] < V_HEAD_DIM))
    tl.store(lse_ptr + head.to(tl.int64) * total_q + rows, lse, mask=inside)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, softmax_scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o like q in out_dtype, lse fp32."""
    total_q, n_heads, head_dim = q.shape
    total_k, n_kv_heads, v_head_dim = v.shape
    o = torch.empty(total_q, n_heads, v_head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(n_heads, total_q, dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    block_dv = triton.next_power_of_2(v_head_dim)
    tiles = tile_config(arch_of(q.device), max(block_d, block_dv), "fwd", q.element_size())
    grid, n_tiles = grid_of_tiles(schedule.query_tiles, n_heads, tiles.block_m)
    if grid == 0:
        return o, lse
    _fwd_kernel[(grid,)](
        q, k, v, o, lse, schedule.key_start, schedule.key_end, schedule.query_tiles,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        total_q, total_k, n_heads, n_tiles, heads_per_section(k, v, n_heads), softmax_scale * 1.4426950408889634,
        GROUP=n_heads // n_kv_heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PARTS=WORK_TILE // tiles.block_m, PRECISION=precision_of(q),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return o, lse
