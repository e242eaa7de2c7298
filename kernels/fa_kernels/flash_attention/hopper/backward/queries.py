"""dQ alone at head_dim 128 and 256, for Hopper: one owner of each output, nothing added in memory, so repeatable.

One producer warp loads Q and dO once, then blocks of K and V, through TMA; two warpgroups hold 64 queries each, with
scores of their own, and feed dS to dQ = dS K from registers. It follows a kernel of dK and dV (keys.py,
wide.py), which computes the scores too. A program works one item, 128 queries of a head.

What binds, for 128 queries x 128 keys (cycles of one SM, as wide.py counts them; at 256, for 128 x 64; a soft cap
doubles the exponentials):

| head_dim | tensor cores | shared memory | exponentials |
|:---------|-------------:|--------------:|-------------:|
| 128      | 3072         | 2560          | 1024         |
| 256      | 3072         | 3072          | 512          |

Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608, section 3.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP, hand_back, meet
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import keep_columns
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.tile_order import heads_per_section, tile_and_head
from fa_kernels.launch.descriptors import rows_of_heads
from fa_kernels.launch.record import launch

BLOCK_M = WORK_TILE // 2  # queries of a warpgroup
# of a thread when a kernel starts; then of one in the second consumer and of one in the producer's warps, which leave
# 240 of 64K to the first consumer's
THREAD_REGISTERS, REGISTERS = 168, (240, 24)


@dataclass(frozen=True)
class QueryTiles:
    """block_n keys a step; two stages of K and v_stages of V in flight, which is done with first.

    arrivals: of a warpgroup that has read K or V, from one thread for all or each. One is faster at 256 alone: both
    passes at 16k 456 TFLOP/s for 432, at 128 463 for 469.
    """

    block_n: int
    v_stages: int
    arrivals: int


K_STAGES = 2
TILES = {  # by head_dim; 192 and 224 KiB of shared memory
    128: QueryTiles(128, v_stages=2, arrivals=WARPGROUP.value),
    256: QueryTiles(64, v_stages=1, arrivals=1),
}


@gluon.jit
def _walk(item, order, ranges, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """An item's first query, its head and KV head, the first key to visit, and the number of blocks."""
    tiles_ptr, n_tiles, n_heads, section = order
    key_start_ptr, key_end_ptr, total_q = ranges
    tile, head = tile_and_head(item, tiles_ptr, n_tiles, n_heads, section, 1)
    first = tile * ROWS
    last = gl.minimum(first + ROWS, total_q) - 1
    start = gl.load(key_start_ptr + first)
    end = gl.load(key_end_ptr + last)
    return first, head, head // GROUP, start, gl.maximum(end - start + BLOCK_N - 1, 0) // BLOCK_N


@gluon.jit
def _produce(q_desc, k_desc, v_desc, do_desc, strides, buffers, order, ranges, GROUP: gl.constexpr):
    """One warp: loads each consumer's queries of the item, then its blocks of K and of V."""
    stride_qh, stride_kh, stride_vh, stride_doh = strides
    q_bufs, do_bufs, k_bufs, v_bufs = buffers[0]
    q_full, k_full, v_full, k_empty, v_empty = buffers[1]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    K_STAGES: gl.constexpr = k_bufs.shape[0]
    V_STAGES: gl.constexpr = v_bufs.shape[0]
    BYTES: gl.constexpr = 2 * k_bufs.shape[2]  # of one row
    first, head, kv_head, key, n_blocks = _walk(gl.program_id(0), order, ranges, GROUP, 2 * BLOCK_M, BLOCK_N)
    for consumer in gl.static_range(2):
        row = first + consumer * BLOCK_M
        here = q_full.index(consumer)
        mbarrier.expect(here, 2 * BLOCK_M * BYTES)
        tma.async_copy_global_to_shared(q_desc, [row, head * stride_qh], here, q_bufs.index(consumer))
        tma.async_copy_global_to_shared(do_desc, [row, head * stride_doh], here, do_bufs.index(consumer))
    for step in range(n_blocks):
        k_stage, v_stage = step % K_STAGES, step % V_STAGES
        k_here, v_here = k_full.index(k_stage), v_full.index(v_stage)
        mbarrier.wait(k_empty.index(k_stage), (step // K_STAGES) & 1 ^ 1)
        mbarrier.expect(k_here, BLOCK_N * BYTES)
        tma.async_copy_global_to_shared(k_desc, [key, kv_head * stride_kh], k_here, k_bufs.index(k_stage))
        mbarrier.wait(v_empty.index(v_stage), (step // V_STAGES) & 1 ^ 1)
        mbarrier.expect(v_here, BLOCK_N * BYTES)
        tma.async_copy_global_to_shared(v_desc, [key, kv_head * stride_vh], v_here, v_bufs.index(v_stage))
        key += BLOCK_N


@gluon.jit
def _hand_back(empty, ARRIVALS: gl.constexpr):
    if ARRIVALS == 1:
        mbarrier.arrive(empty, count=1)
    else:
        hand_back(empty)


@gluon.jit
def _consume(CONSUMER: gl.constexpr, dq_desc, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges,
             HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr):  # fmt: skip
    """Four warps: dQ of 64 queries of the item, dS from registers."""
    softmax_scale, softcap = scale
    q_bufs, do_bufs, k_bufs, v_bufs = buffers[0]
    q_full, k_full, v_full, k_empty, v_empty = buffers[1]
    key_start_ptr, key_end_ptr, total_q = ranges
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    D: gl.constexpr = k_bufs.shape[2]
    K_STAGES: gl.constexpr = k_bufs.shape[0]
    V_STAGES: gl.constexpr = v_bufs.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    dtype: gl.constexpr = q_bufs.dtype
    first, head, _, key, n_blocks = _walk(gl.program_id(0), order, ranges, GROUP, 2 * BLOCK_M, BLOCK_N)
    first += CONSUMER * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    inside = rows < total_q
    key_start = gl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = gl.load(key_end_ptr + rows, mask=inside, other=0)
    # 2^(score - inf) is 0: a row that sees nothing, or is none, takes no part
    row_offset = head.to(gl.int64) * total_q
    lse = gl.load(lse_ptr + row_offset + rows, mask=inside, other=float("-inf"))
    lse = gl.expand_dims(gl.where(lse == float("-inf"), float("inf"), lse * LOG2_E), 1)
    delta = gl.expand_dims(gl.load(delta_ptr + row_offset + rows, mask=inside, other=0.0), 1)
    # a block between these needs no mask: ranges only move forwards from query to query
    last = gl.minimum(first + BLOCK_M, total_q) - 1
    whole_start = gl.load(key_start_ptr + last)
    whole_end = gl.load(key_end_ptr + gl.minimum(first, last))
    q, do = q_bufs.index(CONSUMER), do_bufs.index(CONSUMER)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([BLOCK_M, D], gl.float32, layout=OUT)
    mbarrier.wait(q_full.index(CONSUMER), 0)
    for step in range(n_blocks):
        k_stage, v_stage = step % K_STAGES, step % V_STAGES
        k, v = k_bufs.index(k_stage), v_bufs.index(v_stage)
        mbarrier.wait(k_full.index(k_stage), (step // K_STAGES) & 1)
        scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [M, N]
        mbarrier.wait(v_full.index(v_stage), (step // V_STAGES) & 1)
        dp = warpgroup_mma(do, v.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            p = gl.exp2(scores - lse)
            p = p * (1.0 - t * t)
        else:
            p = gl.exp2(scores * (softmax_scale * LOG2_E) - lse)
        if (key < whole_start) | (key + BLOCK_N > whole_end):
            p = keep_columns(p, key_start - key, key_end - key, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        _hand_back(v_empty.index(v_stage), ARRIVALS)
        ds = (p * (dp - delta)).to(dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, OPERAND), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _hand_back(k_empty.index(k_stage), ARRIVALS)
        key += BLOCK_N
    if spoiled_ptr is not None:
        mark_rows(dq, None, first, head, total_q, spoiled_ptr, CONSUMER)
    # dQ leaves through Q's buffer, which only this consumer reads: when all its warps have
    meet()
    q.store((dq * softmax_scale).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [first, head * D], q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(
    "n_tiles", "n_heads", "section", "total_q", "stride_qh", "stride_kh", "stride_vh", "stride_doh"
))  # fmt: skip
def _dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc,
    lse_ptr, delta_ptr, tiles_ptr, key_start_ptr, key_end_ptr, spoiled_ptr, softmax_scale, softcap,
    n_tiles, n_heads, section, total_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """An item: dQ of 128 queries of one head. Program i works item i.

    spoiled_ptr is None, or where to mark NaN in dQ (nan_marks.py).
    """
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = q_desc.block_type.shape[1]
    q_bufs = gl.allocate_shared_memory(dtype, [2, BLOCK_M, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [2, BLOCK_M, D], do_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [K_STAGES, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [V_STAGES, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for consumer in gl.static_range(2):
        mbarrier.init(q_full.index(consumer), count=1)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2 * ARRIVALS)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2 * ARRIVALS)
    buffers = ((q_bufs, do_bufs, k_bufs, v_bufs), (q_full, k_full, v_full, k_empty, v_empty))
    order = (tiles_ptr, n_tiles, n_heads, section)
    ranges = (key_start_ptr, key_end_ptr, total_q)
    scale = (softmax_scale, softcap)
    strides = (stride_qh, stride_kh, stride_vh, stride_doh)
    gl.warp_specialize([
        (_consume, (0, dq_desc, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges, HAS_SOFTCAP, GROUP,
                    ARRIVALS)),
        (_consume, (1, dq_desc, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges, HAS_SOFTCAP, GROUP,
                    ARRIVALS)),
        (_produce, (q_desc, k_desc, v_desc, do_desc, strides, buffers, order, ranges, GROUP)),
    ], [4, 1], REGISTERS)  # fmt: skip


def gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, spoiled: Tensor | None,
    schedule: Schedule, features: Features,
) -> Tensor:  # fmt: skip
    """do like o, lse and delta (n_heads, total_q) fp32 -> dq, dense, in the dtype of q; the same bits in every run.

    For a head_dim in TILES, and rows that descriptors.loadable takes. spoiled (nan_isolation.new_marks) gets the
    marks of NaN in dq.
    """
    total_q, n_heads, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = TILES[head_dim]
    operands = (q, BLOCK_M), (k, tiles.block_n), (v, tiles.block_n), (do, BLOCK_M), (dq, BLOCK_M)
    n_tiles = schedule.query_tiles.numel()
    launch(
        _dq_kernel, (n_tiles * n_heads,),
        *[rows_of_heads(x, block) for x, block in operands], lse, delta, schedule.query_tiles, schedule.key_start,
        schedule.key_end, spoiled, features.softmax_scale, features.softcap, n_tiles, n_heads,
        heads_per_section(k, v, n_heads), total_q, q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // k.shape[1], K_STAGES=K_STAGES, V_STAGES=tiles.v_stages,
        ARRIVALS=tiles.arrivals, REGISTERS=REGISTERS, num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
    return dq
