"""A Hopper kernel for dK and dV in fp16 at head_dim 128 with a soft cap.

In fp16 at head_dim 128 with a soft cap, the fused kernel (fused.py) would need too many registers. One program of this
kernel computes dK and dV of 128 keys of one KV head. A producer warp loads all inputs by TMA. Two consumer warpgroups
own 64 keys each. The consumers compute S and dP transposed, as [keys, queries], so that the matmuls for dV and dK can
read P^T and dS^T from registers. Exactly one program writes each output, so every run gives the same bits.

Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608, section 3.1.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.device import ceil_div, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.dq_sum import ROW_ALIGNMENT
from fa_kernels.flash_attention.hopper.backward.items import (
    BLOCK_N,
    SIZES,
    Descriptors,
    Inputs,
    Visible,
    first_step,
    hide,
    locate_item,
    new_buffers,
    new_item_barriers,
    next_step,
    produce,
    visible_queries,
)
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import CONSUMERS_BARRIER, hand_back, meet, named_barrier
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout, operand_layout
from fa_kernels.flash_attention.hopper.primitives.ring import place_of
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale, TileOrder
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.structure import structure
from fa_kernels.flash_attention.tile_order import kv_heads_per_section
from fa_kernels.launch.descriptors import elements, rows_of_heads
from fa_kernels.launch.record import launch

BLOCK_M = 64  # queries per step
STAGES = 4  # the number of steps with buffers for Q and dO. The kernel uses 194 KiB of shared memory.
# All warps start with `START_REGISTERS` registers per thread. The second consumer and the producer then change to
# `WORKER_REGISTERS`. The first consumer gets the remaining 240 registers per thread.
START_REGISTERS, WORKER_REGISTERS = 168, (240, 24)


@structure
class _Keys:
    """A consumer's 64 keys."""

    first: gl.tensor
    k: gl.shared_memory_descriptor  # [64, D]
    v: gl.shared_memory_descriptor
    visible: Visible  # the queries that see each key


@gluon.jit
def _keys_of_consumer(item, CONSUMER: gl.constexpr, buffers, ranges):
    """Returns the consumer's half of the item's keys. The loads of K and V may still be in flight."""
    BLOCK_M: gl.constexpr = buffers.q[0].shape[1]
    KEYS: gl.constexpr = buffers.k[0].shape[1] // 2
    first = item.first + CONSUMER * KEYS
    visible = visible_queries(ranges, first, KEYS, gl.SliceLayout(1, accumulator_layout(BLOCK_M)))
    k = buffers.k[0].index(0).slice(CONSUMER * KEYS, KEYS, dim=0)
    v = buffers.v[0].index(0).slice(CONSUMER * KEYS, KEYS, dim=0)
    return _Keys(first, k, v, visible)


@gluon.jit
def _step(dk, dv, step, m, keys, buffers, barriers, scale):
    """Processes one step, whose first query is `m`. Returns dK and dV."""
    q_bufs, do_bufs = buffers.q[0], buffers.do[0]
    STAGES: gl.constexpr = q_bufs.shape[0]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    KEYS: gl.constexpr = dk.shape[0]
    D: gl.constexpr = dk.shape[1]
    SCORES_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    QUERIES_LAYOUT: gl.constexpr = gl.SliceLayout(0, SCORES_LAYOUT)
    dtype: gl.constexpr = q_bufs.dtype
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES_LAYOUT)
    stage, phase = place_of(step, STAGES)
    q, do = q_bufs.index(stage), do_bufs.index(stage)  # [M, D]
    mbarrier.wait(barriers.q_full.index(stage), phase)
    scores = warpgroup_mma(keys.k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [64, M]
    mbarrier.wait(barriers.do_full.index(stage), phase)
    dp = warpgroup_mma(keys.v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = gl.expand_dims(buffers.lse.index(stage).load(QUERIES_LAYOUT), 0)
    scores, t = cap(scores, scale.softmax, scale.softcap, dtype)
    slope = 1.0 - t * t
    p = hide(gl.exp2(scores - lse), keys.visible, m)
    p_low = p.to(dtype)
    p = p * slope
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(gl.convert_layout(p_low, operand_layout(D)), do, dv, is_async=True)
    delta = gl.expand_dims(buffers.delta.index(stage).load(QUERIES_LAYOUT), 0)
    ds = (p * (dp - delta)).to(dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, operand_layout(D)), q, dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    hand_back(barriers.empty.index(stage))
    return dk, dv


@gluon.jit
def _store(dk, dv, item, keys, buffers, scale, CONSUMER: gl.constexpr, out_desc):
    """Stores dK and dV in global memory by TMA, through the shared-memory buffers of K and V.

    Consumer 0 stores dK of all keys of the item, and consumer 1 stores dV of all keys of the item.
    """
    D: gl.constexpr = dk.shape[1]
    meet()  # waits until all warps of this consumer have read the consumer's half of K and V
    keys.k.store((dk * scale.softmax).to(keys.k.dtype))
    keys.v.store(dv.to(keys.v.dtype))
    fence_async_shared()
    named_barrier(CONSUMERS_BARRIER, 256)  # waits until both consumers have written dK and dV to shared memory
    k_buf, v_buf = buffers.k[0].index(0), buffers.v[0].index(0)
    tma.async_copy_shared_to_global(out_desc, [item.first, item.kv_head * D], k_buf if CONSUMER == 0 else v_buf)
    tma.store_wait(0)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, out_desc, buffers, barriers, tile_order, ranges, marks_ptr, scale, GROUP: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Runs a consumer warpgroup, which computes dK and dV of half of an item's keys."""
    BLOCK_M: gl.constexpr = buffers.q[0].shape[1]
    D: gl.constexpr = buffers.q[0].shape[2]
    BLOCK_N: gl.constexpr = buffers.k[0].shape[1]
    item = locate_item(gl.program_id(0), tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    m, head = first_step(item, GROUP, BLOCK_M)
    keys = _keys_of_consumer(item, CONSUMER, buffers, ranges)
    dk = gl.zeros([BLOCK_N // 2, D], gl.float32, layout=accumulator_layout(D))
    dv = gl.zeros([BLOCK_N // 2, D], gl.float32, layout=accumulator_layout(D))
    mbarrier.wait(barriers.kv_full.index(0), 0)
    for step in range(item.n_steps):
        dk, dv = _step(dk, dv, step, m, keys, buffers, barriers, scale)
        m, head = next_step(m, head, item, GROUP, BLOCK_M)
    if marks_ptr is not None:
        mark_rows((dk + dv,), keys.first, item.kv_head, ranges.total, marks_ptr, CONSUMER)
    _store(dk, dv, item, keys, buffers, scale, CONSUMER, out_desc)


@gluon.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_delta_desc, dk_desc, dv_desc,
    tiles_ptr, query_start_ptr, query_end_ptr, marks_ptr, softmax_scale, softcap,
    n_items, n_tiles, n_kv_heads, section, total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ALIGNMENT: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV of work items.

    An item is 128 keys of one KV head, with all query heads that share this KV head. Program i processes work item i.

    marks_ptr: the pointer to the NaN marks of dK and dV (nan_marks.py), or None.
    """
    descs = Descriptors((q_desc,), (k_desc,), (v_desc,), (do_desc,), lse_delta_desc)
    buffers = new_buffers(descs, STAGES, 1)
    barriers = new_item_barriers(STAGES, 1)
    tile_order = TileOrder(tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = Ranges(query_start_ptr, query_end_ptr, total_k)
    scale = Scale(softmax_scale, softcap)
    delta_start = n_kv_heads * GROUP * padded_q
    inputs = Inputs(descs, stride_qh, stride_kh, stride_vh, stride_doh, padded_q)
    gl.warp_specialize([
        (_consume, (0, dk_desc, buffers, barriers, tile_order, ranges, marks_ptr, scale, GROUP, ALIGNMENT)),
        (_consume, (1, dv_desc, buffers, barriers, tile_order, ranges, marks_ptr, scale, GROUP, ALIGNMENT)),
        (produce, (inputs, delta_start, buffers, barriers, tile_order, ranges, None, None, n_items, GROUP, ALIGNMENT)),
    ], [4, 1], WORKER_REGISTERS)  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_delta: Tensor, marks: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv, which are contiguous.

    lse_delta: as in dq_sum.Prepared.
    marks: the tensor to which the NaN marks of dk and dv are written (nan_isolation.new_marks), or None.
    """
    n_heads = q.shape[1]
    total_k, n_kv_heads, _ = k.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    n_tiles = ceil_div(total_k, BLOCK_N)
    descs = [
        rows_of_heads(x, block)
        for x, block in ((q, BLOCK_M), (k, BLOCK_N), (v, BLOCK_N), (do, BLOCK_M), (dk, BLOCK_N), (dv, BLOCK_N))
    ]
    n_items = n_tiles * n_kv_heads
    section = kv_heads_per_section(q, n_kv_heads, n_tiles, multiprocessors(q.device))
    launch(
        _dkdv_kernel, (n_items,),
        *descs[:4], elements(lse_delta, BLOCK_M), *descs[4:],
        schedule.key_tiles, schedule.query_start, schedule.query_end, marks, features.softmax_scale, features.softcap,
        n_items, n_tiles, n_kv_heads, section, total_k, lse_delta.shape[-1],
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        GROUP=n_heads // n_kv_heads, STAGES=STAGES, ALIGNMENT=ROW_ALIGNMENT,
        WORKER_REGISTERS=WORKER_REGISTERS, num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip
    return dk, dv
