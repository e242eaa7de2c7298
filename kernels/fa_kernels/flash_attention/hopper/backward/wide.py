"""dK and dV of 64 keys at head_dim 256, for Hopper; dQ is a kernel of its own (queries.py).

A [64, 256] fp32 accumulator takes 128 registers of each thread of a warpgroup, so each warpgroup holds one. For dK and
dV, one has S^T = K Q^T, P^T and dV, the other dP^T = V dO^T, dS^T and dK; P goes from the first to the second through
shared memory, in 16 bits, and the layout of the products' results is that of both. With dQ that is seven matmuls where
one pass over the scores needs five, but each output has one owner: there is no sum in global memory, and gradients are
bitwise repeatable.

What binds, for 64 queries x 64 keys (cycles of one SM; a matmul is 512 on the tensor cores at 4096 FLOP a cycle;
shared memory gives 128 bytes a cycle, of which S and dP take 512 each, dV, dK and dQ 256 each with their A in
registers, P 128, and TMA's writes 512 for Q and dO, 256 for K and V, which two warpgroups share):

- dK and dV: tensor cores 2048, shared memory 2176, 64 KiB from L2;
- dQ (queries.py): tensor cores 1536, shared memory 1536, 32 KiB from L2.

One pass, whose third warpgroup computes dQ = dS K, would take 2560 and 2624, or 3776 with its sums through shared
memory, and add 64 KiB of fp32 in L2. It was written both ways, adding from registers and by TMA, and lost. TFLOP/s of
an H200 at commit 4c5c00e, causal bf16, 16k tokens in all, medians; two numbers are those of two rounds:

| tokens a document, heads / KV heads | two kernels | one, registers | one, TMA | cuDNN   | portable |
|:------------------------------------|------------:|---------------:|---------:|--------:|---------:|
| 16k, 8 / 8                          | 442-476     | 430-439        | 375-395  | 380-410 | 273-293  |
| 8k, 16 / 4                          | 441         | 433            | 364      | 390     |          |
| 2k, 8 / 8                           | 358         | 352            | 307      | 318     |          |

Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608, section 3.1.
"""

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

from fa_kernels.device import LOG2_E, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.items import SIZES, next_step
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import keep_columns
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.tile_order import kv_heads_per_section, tile_and_head
from fa_kernels.launch.descriptors import elements, rows_of_heads
from fa_kernels.launch.record import launch

HEAD_DIM = 256
BLOCK = 64  # queries and keys of a step; a program has one such block of keys
STAGES = 2  # of Q and of dO in flight for dK and dV
PARTS = WORK_TILE // BLOCK
# of a thread when a kernel starts; then of one in the second group of warps and of one in the producer's, which leave
# 240 of 64K to the first group's
THREAD_REGISTERS, REGISTERS = 168, (240, 24)


@gluon.jit
def _walk(order, ranges, GROUP: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr):
    """This program's first key, its KV head, the first query to visit, where they end, and the number of steps.

    Queries are visited in aligned blocks. Of a work tile at the end, some blocks have no keys, and so no steps.
    """
    tiles_ptr, n_tiles, n_kv_heads, section = order
    query_start_ptr, query_end_ptr, total_k = ranges
    tile, kv_head = tile_and_head(gl.program_id(0), tiles_ptr, n_tiles, n_kv_heads, section, PARTS)
    first = tile * BLOCK
    last = gl.minimum(first + BLOCK, total_k) - 1
    start = gl.load(query_start_ptr + first, mask=first < total_k, other=0) // BLOCK * BLOCK
    end = gl.load(query_end_ptr + last, mask=first < total_k, other=0)
    n_steps = gl.maximum(end - start + BLOCK - 1, 0) // BLOCK * GROUP
    return first, kv_head, start, end, n_steps


@gluon.jit
def _produce(descriptors, strides, padded_q, buffers, order, ranges, GROUP: gl.constexpr, PARTS: gl.constexpr):
    """One warp: fills the buffers in the order in which the consumers empty them."""
    q_desc, k_desc, v_desc, do_desc, rows_desc = descriptors
    stride_qh, stride_kh, stride_vh, stride_doh = strides
    q_bufs, do_bufs, lse_bufs, delta_bufs, k_buf, v_buf = buffers[0]
    k_full, v_full, q_full, do_full, q_empty, do_empty = buffers[1]
    BLOCK: gl.constexpr = k_buf.shape[0]
    STAGES: gl.constexpr = q_bufs.shape[0]
    first, kv_head, m, end, n_steps = _walk(order, ranges, GROUP, BLOCK, PARTS)
    start, head = m, kv_head * GROUP
    delta_rows = order[2] * GROUP * padded_q  # where delta begins, behind lse
    mbarrier.expect(k_full, k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [first, kv_head * stride_kh], k_full, k_buf)
    mbarrier.expect(v_full, v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [first, kv_head * stride_vh], v_full, v_buf)
    for step in range(n_steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1 ^ 1
        row = head * padded_q + m
        q_here, do_here = q_full.index(stage), do_full.index(stage)
        mbarrier.wait(q_empty.index(stage), phase)
        mbarrier.expect(q_here, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [m, head * stride_qh], q_here, q_bufs.index(stage))
        tma.async_copy_global_to_shared(rows_desc, [row], q_here, lse_bufs.index(stage))
        mbarrier.wait(do_empty.index(stage), phase)
        mbarrier.expect(do_here, do_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [m, head * stride_doh], do_here, do_bufs.index(stage))
        tma.async_copy_global_to_shared(rows_desc, [delta_rows + row], do_here, delta_bufs.index(stage))
        m, head = next_step(m, head, start, end, GROUP, BLOCK)


@gluon.jit
def _consume_dv(dv_desc, spoiled_ptr, scale, buffers, exchange, order, ranges, HAS_SOFTCAP: gl.constexpr,
                GROUP: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Four warps: S and P of each step, which they hand to those of dK, and dV."""
    softmax_scale, softcap = scale
    q_bufs, do_bufs, lse_bufs, _, k_buf, _ = buffers[0]
    k_full, _, q_full, do_full, q_empty, do_empty = buffers[1]
    p_bufs, p_full, p_empty = exchange
    query_start_ptr, query_end_ptr, total_k = ranges
    BLOCK: gl.constexpr = k_buf.shape[0]
    HALF: gl.constexpr = k_buf.shape[1] // 2
    STAGES: gl.constexpr = q_bufs.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = q_bufs.dtype
    first, kv_head, m, end, n_steps = _walk(order, ranges, GROUP, BLOCK, PARTS)
    start, head = m, kv_head * GROUP
    keys = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
    # keys past the last one are seen by no query: their P would be 2^-lse, without bound
    query_start = gl.load(query_start_ptr + keys, mask=keys < total_k, other=0x7FFFFFFF)
    query_end = gl.load(query_end_ptr + keys, mask=keys < total_k, other=0)
    # a step between these needs no mask; ranges only move forwards from key to key, except past the last one
    last = first + BLOCK - 1
    whole_start = gl.load(query_start_ptr + last, mask=last < total_k, other=0x7FFFFFFF)
    whole_end = gl.load(query_end_ptr + first, mask=first < total_k, other=0)
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, layout=SCORES)
    dv_0 = gl.zeros([BLOCK, HALF], gl.float32, layout=OUT)
    dv_1 = gl.zeros([BLOCK, HALF], gl.float32, layout=OUT)
    mbarrier.wait(k_full, 0)
    for step in range(n_steps):
        stage, phase = step % STAGES, (step // STAGES) & 1
        do = do_bufs.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        q = q_bufs.index(stage)  # [M, D]
        scores = warpgroup_mma(k_buf, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [N, M]
        lse = gl.expand_dims(lse_bufs.index(stage).load(QUERIES), 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(q_empty.index(stage), count=1)
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            p = gl.exp2(scores - lse)
        else:
            p = gl.exp2(scores * (softmax_scale * LOG2_E) - lse)
        if (m < whole_start) | (m + BLOCK > whole_end):
            p = keep_columns(p, query_start - m, query_end - m, 0.0)
        p_low = p.to(dtype)
        mbarrier.wait(p_empty.index(stage), phase ^ 1)
        if HAS_SOFTCAP:
            p_bufs.index(stage).store((p * (1.0 - t * t)).to(dtype))
        else:
            p_bufs.index(stage).store(p_low)
        mbarrier.arrive(p_full.index(stage), count=1)
        mbarrier.wait(do_full.index(stage), phase)
        p_operand = gl.convert_layout(p_low, OPERAND)
        dv_0 = warpgroup_mma(p_operand, do.slice(0, HALF, dim=1), dv_0, is_async=True)
        dv_1 = warpgroup_mma(p_operand, do.slice(HALF, HALF, dim=1), dv_1, is_async=True)
        dv_0, dv_1 = warpgroup_mma_wait(0, deps=[dv_0, dv_1])
        mbarrier.arrive(do_empty.index(stage), count=1)
        m, head = next_step(m, head, start, end, GROUP, BLOCK)
    if spoiled_ptr is not None:
        mark_rows(dv_0, dv_1, first, kv_head, total_k, spoiled_ptr, 0, THREADS=256)
    # dV leaves through K's buffer, which S alone reads; the wait for P's last reader is in what was measured, no more
    final = n_steps - 1
    mbarrier.wait(p_empty.index(final % STAGES), (final // STAGES) & 1, pred=n_steps > 0)
    k_buf.slice(0, HALF, dim=1).store(dv_0.to(dtype))
    k_buf.slice(HALF, HALF, dim=1).store(dv_1.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_desc, [first, kv_head * 2 * HALF], k_buf)
    tma.store_wait(0)


@gluon.jit
def _consume_dk(dk_desc, spoiled_ptr, scale, buffers, exchange, order, ranges, GROUP: gl.constexpr,
                PARTS: gl.constexpr):  # fmt: skip
    """Four warps: dP of each step, dS with the P that those of dV hand them, and dK."""
    softmax_scale, _ = scale
    q_bufs, do_bufs, _, delta_bufs, _, v_buf = buffers[0]
    _, v_full, q_full, do_full, q_empty, do_empty = buffers[1]
    p_bufs, p_full, p_empty = exchange
    BLOCK: gl.constexpr = v_buf.shape[0]
    HALF: gl.constexpr = v_buf.shape[1] // 2
    STAGES: gl.constexpr = q_bufs.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    dtype: gl.constexpr = q_bufs.dtype
    first, kv_head, _, _, n_steps = _walk(order, ranges, GROUP, BLOCK, PARTS)
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, layout=SCORES)
    dk_0 = gl.zeros([BLOCK, HALF], gl.float32, layout=OUT)
    dk_1 = gl.zeros([BLOCK, HALF], gl.float32, layout=OUT)
    mbarrier.wait(v_full, 0)
    for step in range(n_steps):
        stage, phase = step % STAGES, (step // STAGES) & 1
        mbarrier.wait(do_full.index(stage), phase)
        do = do_bufs.index(stage)
        dp = warpgroup_mma(v_buf, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [N, M]
        delta = gl.expand_dims(delta_bufs.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
        mbarrier.wait(p_full.index(stage), phase)
        p = p_bufs.index(stage).load(SCORES).to(gl.float32)
        mbarrier.arrive(p_empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(do_empty.index(stage), count=1)
        ds = (p * (dp - delta)).to(dtype)
        mbarrier.wait(q_full.index(stage), phase)
        q = q_bufs.index(stage)
        ds_operand = gl.convert_layout(ds, OPERAND)
        dk_0 = warpgroup_mma(ds_operand, q.slice(0, HALF, dim=1), dk_0, is_async=True)
        dk_1 = warpgroup_mma(ds_operand, q.slice(HALF, HALF, dim=1), dk_1, is_async=True)
        dk_0, dk_1 = warpgroup_mma_wait(0, deps=[dk_0, dk_1])
        mbarrier.arrive(q_empty.index(stage), count=1)
    if spoiled_ptr is not None:
        mark_rows(dk_0, dk_1, first, kv_head, ranges[2], spoiled_ptr, 0, THREADS=256)
    # nothing else reads V
    v_buf.slice(0, HALF, dim=1).store((dk_0 * softmax_scale).to(dtype))
    v_buf.slice(HALF, HALF, dim=1).store((dk_1 * softmax_scale).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [first, kv_head * 2 * HALF], v_buf)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc,
    tiles_ptr, query_start_ptr, query_end_ptr, spoiled_ptr, softmax_scale, softcap, n_tiles, n_kv_heads, section,
    total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: 64 keys of one KV head, over all query heads that share it.

    padded_q is the length of a head's lse and delta; spoiled_ptr None, or where to mark NaN in dK and dV.
    """
    dtype: gl.constexpr = q_desc.dtype
    BLOCK: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], do_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [BLOCK, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [BLOCK, D], v_desc.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    p_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, BLOCK], p_layout)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], rows_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], rows_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(do_empty.index(stage), count=2)
        mbarrier.init(p_full.index(stage), count=1)
        mbarrier.init(p_empty.index(stage), count=1)
    buffers = (
        (q_bufs, do_bufs, lse_bufs, delta_bufs, k_buf, v_buf),
        (k_full, v_full, q_full, do_full, q_empty, do_empty),
    )
    exchange = (p_bufs, p_full, p_empty)
    order = (tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = (query_start_ptr, query_end_ptr, total_k)
    scale = (softmax_scale, softcap)
    loads = (q_desc, k_desc, v_desc, do_desc, rows_desc)
    strides = (stride_qh, stride_kh, stride_vh, stride_doh)
    gl.warp_specialize([
        (_consume_dv, (dv_desc, spoiled_ptr, scale, buffers, exchange, order, ranges, HAS_SOFTCAP, GROUP, PARTS)),
        (_consume_dk, (dk_desc, spoiled_ptr, scale, buffers, exchange, order, ranges, GROUP, PARTS)),
        (_produce, (loads, strides, padded_q, buffers, order, ranges, GROUP, PARTS)),
    ], [4, 1], REGISTERS)  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, spoiled: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """do like o, rows as dq_sum.Prepared has them -> dk, dv, dense, in the dtype of k and v.

    For head_dim 256, and rows that descriptors.loadable takes. spoiled (nan_isolation.new_marks) gets the
    marks of NaN.
    """
    n_heads, (total_k, n_kv_heads, _) = q.shape[1], k.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    n_tiles = schedule.key_tiles.numel() * PARTS
    section = kv_heads_per_section(q, n_kv_heads, n_tiles, multiprocessors(q.device))
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc = (rows_of_heads(x, BLOCK) for x in (q, k, v, do, dk, dv))
    launch(
        _dkdv_kernel, (n_tiles * n_kv_heads,),
        q_desc, k_desc, v_desc, do_desc, elements(rows, BLOCK), dk_desc, dv_desc, schedule.key_tiles,
        schedule.query_start, schedule.query_end, spoiled, features.softmax_scale, features.softcap,
        n_tiles, n_kv_heads, section, total_k, rows.shape[-1], q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // n_kv_heads, STAGES=STAGES, PARTS=PARTS,
        REGISTERS=REGISTERS, num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
    return dk, dv
