"""A Hopper kernel for dK and dV at head_dim 256, with 64 keys per program. Another kernel computes dQ (queries.py).

An fp32 accumulator [64, 256] needs 128 registers of each thread, so a warpgroup can hold only one such accumulator. The
first warpgroup computes S^T = K Q^T, P^T and dV. The second warpgroup computes dP^T = V dO^T, dS^T and dK. The first
warpgroup passes P^T to the second warpgroup through shared memory, in 16 bits. Together, this kernel and the kernel for
dQ need seven matmuls, while a fused kernel for dQ, dK and dV would need only five. Exactly one program writes each
output, so no sum in global memory is needed, and every run gives the same bits.

The table gives the costs of one block of 64 x 64 scores on one multiprocessor. The costs of tensor cores and of shared
memory are lower bounds on the time in cycles. The tensor cores do 4096 FLOP per cycle, so a matmul (64 x 64 x 256)
needs 512 cycles. Shared memory transfers 128 bytes per cycle.

| outputs         | tensor cores | shared memory | loads from L2 |
|:----------------|-------------:|--------------:|--------------:|
| dK and dV       | 2048         | 2176          | 64 KiB        |
| dQ (queries.py) | 1536         | 1536          | 32 KiB        |

A fused kernel, with a third warpgroup for dQ, was slower than this kernel and the kernel for dQ together. For one block
of 64 x 64 scores, the fused kernel needs at least 2560 cycles of the tensor cores and 2624 cycles of shared memory. The
fused kernel also adds 64 KiB of fp32 values to dQ in L2.

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

from fa_kernels.device import LOG2_E, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.items import (
    SIZES,
    Buffers,
    Descriptors,
    Inputs,
    Item,
    first_step,
    hide,
    next_step,
    visible_queries,
)
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.columns import new_buffer
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout, operand_layout
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, new_barriers, place_of, wait_full
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale, TileOrder
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.structure import structure
from fa_kernels.flash_attention.tile_order import kv_heads_per_section
from fa_kernels.launch.descriptors import elements, rows_of_heads
from fa_kernels.launch.record import launch

HEAD_DIM = 256
BLOCK = 64  # the number of keys per program, and of queries per step
STAGES = 2  # the number of steps whose Q and dO can be in shared memory at once
TILES_PER_WORK_TILE = WORK_TILE // BLOCK
# All warps start with `START_REGISTERS` registers per thread. The second consumer and the producer then change to the
# numbers of registers in `WORKER_REGISTERS`. The first consumer gets the remaining 240 registers per thread.
START_REGISTERS, WORKER_REGISTERS = 168, (240, 24)


@structure
class _Barriers:
    """The mbarriers: one for K, one for V, two for each stage of Q and lse, and two for each stage of dO and delta."""

    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor


@gluon.jit
def _locate_item(tile_order, ranges, GROUP: gl.constexpr, BLOCK: gl.constexpr, TILES_PER_WORK_TILE: gl.constexpr):
    """Returns the work item of this program. The first query of the item is rounded down to a multiple of `BLOCK`.

    The last tile of the schedule can extend past the last key. An item that lies past the last key has no steps.
    """
    tile, kv_head = tile_order.locate(gl.program_id(0), TILES_PER_WORK_TILE)
    first = tile * BLOCK
    last = gl.minimum(first + BLOCK, ranges.total) - 1
    start = gl.load(ranges.start + first, mask=first < ranges.total, other=0) // BLOCK * BLOCK
    end = gl.load(ranges.end + last, mask=first < ranges.total, other=0)
    return Item(first, kv_head, start, end, gl.maximum(end - start + BLOCK - 1, 0) // BLOCK * GROUP)


@gluon.jit
def _produce(
    inputs, buffers, barriers, tile_order, ranges, GROUP: gl.constexpr, TILES_PER_WORK_TILE: gl.constexpr
):  # fmt: skip
    """Runs the producer warp, which fills the buffers in the order in which the consumers empty them."""
    q_bufs, do_bufs, k_buf, v_buf = buffers.q[0], buffers.do[0], buffers.k[0], buffers.v[0]
    q_desc, k_desc, v_desc, do_desc = inputs.descs.q[0], inputs.descs.k[0], inputs.descs.v[0], inputs.descs.do[0]
    lse_delta_desc = inputs.descs.lse_delta
    BLOCK: gl.constexpr = k_buf.shape[0]
    STAGES: gl.constexpr = q_bufs.shape[0]
    item = _locate_item(tile_order, ranges, GROUP, BLOCK, TILES_PER_WORK_TILE)
    m, head = first_step(item, GROUP, BLOCK)
    delta_start = tile_order.n_heads * GROUP * inputs.padded
    mbarrier.expect(barriers.k_full, k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [item.first, item.kv_head * inputs.stride_kh], barriers.k_full, k_buf)
    mbarrier.expect(barriers.v_full, v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [item.first, item.kv_head * inputs.stride_vh], barriers.v_full, v_buf)
    for step in range(item.n_steps):
        stage, phase = place_of(step, STAGES)
        empty = phase ^ 1
        row = head * inputs.padded + m
        q_full, do_full = barriers.q_full.index(stage), barriers.do_full.index(stage)
        mbarrier.wait(barriers.q_empty.index(stage), empty)
        mbarrier.expect(q_full, q_desc.block_type.nbytes + lse_delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [m, head * inputs.stride_qh], q_full, q_bufs.index(stage))
        tma.async_copy_global_to_shared(lse_delta_desc, [row], q_full, buffers.lse.index(stage))
        mbarrier.wait(barriers.do_empty.index(stage), empty)
        mbarrier.expect(do_full, do_desc.block_type.nbytes + lse_delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [m, head * inputs.stride_doh], do_full, do_bufs.index(stage))
        tma.async_copy_global_to_shared(lse_delta_desc, [delta_start + row], do_full, buffers.delta.index(stage))
        m, head = next_step(m, head, item, GROUP, BLOCK)


@gluon.jit
def _begin_halves(operand, b, halves):
    """Starts the matmul that adds `operand` @ b to an accumulator.

    `halves` holds the left half and the right half of the accumulator's columns.
    """
    HALF: gl.constexpr = halves[0].shape[1]
    first = warpgroup_mma(operand, b.slice(0, HALF, dim=1), halves[0], is_async=True)
    second = warpgroup_mma(operand, b.slice(HALF, HALF, dim=1), halves[1], is_async=True)
    return first, second


@gluon.jit
def _store_halves(halves, scale, buffer, desc, item):
    """Multiplies an accumulator by `scale`, unless `scale` is None, and stores the product in global memory.

    The function first writes the product to `buffer` in shared memory, which held K or V. TMA then copies the product
    to global memory.
    """
    HALF: gl.constexpr = halves[0].shape[1]
    for i in gl.static_range(2):
        values = halves[i] if scale is None else halves[i] * scale
        buffer.slice(i * HALF, HALF, dim=1).store(values.to(buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [item.first, item.kv_head * 2 * HALF], buffer)
    tma.store_wait(0)


@gluon.jit
def _consume_dv(
    dv_desc, marks_ptr, scale, buffers, barriers, p_ring, tile_order, ranges, HAS_SOFTCAP: gl.constexpr,
    GROUP: gl.constexpr, TILES_PER_WORK_TILE: gl.constexpr,
):  # fmt: skip
    """Runs the first consumer, which computes S, P and dV of each step, and writes P to p_ring for the second consumer.

    With a soft cap, the P in p_ring is multiplied by the derivative of the soft cap.
    """
    q_bufs, do_bufs, k_buf = buffers.q[0], buffers.do[0], buffers.k[0]
    BLOCK: gl.constexpr = k_buf.shape[0]
    HALF: gl.constexpr = k_buf.shape[1] // 2
    STAGES: gl.constexpr = q_bufs.shape[0]
    SCORES_LAYOUT: gl.constexpr = accumulator_layout(BLOCK)
    OUT_LAYOUT: gl.constexpr = accumulator_layout(HALF)
    OPERAND_LAYOUT: gl.constexpr = operand_layout(HALF)
    QUERIES_LAYOUT: gl.constexpr = gl.SliceLayout(0, SCORES_LAYOUT)
    dtype: gl.constexpr = q_bufs.dtype
    item = _locate_item(tile_order, ranges, GROUP, BLOCK, TILES_PER_WORK_TILE)
    m, head = first_step(item, GROUP, BLOCK)
    visible = visible_queries(ranges, item.first, BLOCK, gl.SliceLayout(1, SCORES_LAYOUT))
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, layout=SCORES_LAYOUT)
    dv = (
        gl.zeros([BLOCK, HALF], gl.float32, layout=OUT_LAYOUT),
        gl.zeros([BLOCK, HALF], gl.float32, layout=OUT_LAYOUT),
    )
    mbarrier.wait(barriers.k_full, 0)
    for step in range(item.n_steps):
        stage, phase = place_of(step, STAGES)
        do = do_bufs.index(stage)
        mbarrier.wait(barriers.q_full.index(stage), phase)
        q = q_bufs.index(stage)  # [M, D]
        scores = warpgroup_mma(k_buf, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [N, M]
        lse = gl.expand_dims(buffers.lse.index(stage).load(QUERIES_LAYOUT), 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
        if HAS_SOFTCAP:
            scores, t = cap(scores, scale.softmax, scale.softcap, dtype)
            p = gl.exp2(scores - lse)
        else:
            p = gl.exp2(scores * (scale.softmax * LOG2_E) - lse)
        p = hide(p, visible, m)
        p_low = p.to(dtype)
        p_ring.wait_empty(stage, phase)
        if HAS_SOFTCAP:
            p_ring.buffers.index(stage).store((p * (1.0 - t * t)).to(dtype))
        else:
            p_ring.buffers.index(stage).store(p_low)
        mbarrier.arrive(p_ring.full.index(stage), count=1)
        mbarrier.wait(barriers.do_full.index(stage), phase)
        dv = warpgroup_mma_wait(0, deps=_begin_halves(gl.convert_layout(p_low, OPERAND_LAYOUT), do, dv))
        mbarrier.arrive(barriers.do_empty.index(stage), count=1)
        m, head = next_step(m, head, item, GROUP, BLOCK)
    if marks_ptr is not None:
        mark_rows(dv, item.first, item.kv_head, ranges.total, marks_ptr, 0, THREADS=256)
    # dV can overwrite K in shared memory, because only this warpgroup reads K. `wait_full` is not needed for correct
    # results. It is kept because all times of this kernel were measured with it.
    final = item.n_steps - 1
    wait_full(p_ring.empty, final, pred=item.n_steps > 0)
    _store_halves(dv, None, k_buf, dv_desc, item)


@gluon.jit
def _consume_dk(
    dk_desc, marks_ptr, scale, buffers, barriers, p_ring, tile_order, ranges, GROUP: gl.constexpr,
    TILES_PER_WORK_TILE: gl.constexpr,
):  # fmt: skip
    """Runs the second consumer, which computes dP, dS and dK of each step from the P in p_ring."""
    q_bufs, do_bufs, v_buf = buffers.q[0], buffers.do[0], buffers.v[0]
    BLOCK: gl.constexpr = v_buf.shape[0]
    HALF: gl.constexpr = v_buf.shape[1] // 2
    STAGES: gl.constexpr = q_bufs.shape[0]
    SCORES_LAYOUT: gl.constexpr = accumulator_layout(BLOCK)
    OUT_LAYOUT: gl.constexpr = accumulator_layout(HALF)
    OPERAND_LAYOUT: gl.constexpr = operand_layout(HALF)
    dtype: gl.constexpr = q_bufs.dtype
    item = _locate_item(tile_order, ranges, GROUP, BLOCK, TILES_PER_WORK_TILE)
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, layout=SCORES_LAYOUT)
    dk = (
        gl.zeros([BLOCK, HALF], gl.float32, layout=OUT_LAYOUT),
        gl.zeros([BLOCK, HALF], gl.float32, layout=OUT_LAYOUT),
    )
    mbarrier.wait(barriers.v_full, 0)
    for step in range(item.n_steps):
        stage, phase = place_of(step, STAGES)
        mbarrier.wait(barriers.do_full.index(stage), phase)
        do = do_bufs.index(stage)
        dp = warpgroup_mma(v_buf, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [N, M]
        delta = gl.expand_dims(buffers.delta.index(stage).load(gl.SliceLayout(0, SCORES_LAYOUT)), 0)
        p_ring.wait_full(stage, phase)
        p = p_ring.buffers.index(stage).load(SCORES_LAYOUT).to(gl.float32)
        mbarrier.arrive(p_ring.empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(barriers.do_empty.index(stage), count=1)
        ds = (p * (dp - delta)).to(dtype)
        mbarrier.wait(barriers.q_full.index(stage), phase)
        q = q_bufs.index(stage)
        dk = warpgroup_mma_wait(0, deps=_begin_halves(gl.convert_layout(ds, OPERAND_LAYOUT), q, dk))
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    if marks_ptr is not None:
        mark_rows(dk, item.first, item.kv_head, ranges.total, marks_ptr, 0, THREADS=256)
    # dK can overwrite V in shared memory, because only this warpgroup reads V.
    _store_halves(dk, scale.softmax, v_buf, dk_desc, item)


@gluon.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_delta_desc, dk_desc, dv_desc,
    tiles_ptr, query_start_ptr, query_end_ptr, marks_ptr, softmax_scale, softcap, n_tiles, n_kv_heads, section,
    total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, TILES_PER_WORK_TILE: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program computes dK and dV of 64 keys of one KV head, over all query heads that share the KV head.

    padded_q: the number of lse values per head, with padding. marks_ptr: the pointer to the NaN marks of dK and dV
    (nan_marks.py), or None.
    """
    dtype: gl.constexpr = q_desc.dtype
    BLOCK: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q_bufs, do_bufs = new_buffer(q_desc, STAGES), new_buffer(do_desc, STAGES)
    k_buf = gl.allocate_shared_memory(dtype, [BLOCK, D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [BLOCK, D], v_desc.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    p_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, BLOCK], p_layout)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse_delta_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse_delta_desc.layout)
    buffers = Buffers((q_bufs,), (do_bufs,), lse_bufs, delta_bufs, (k_buf,), (v_buf,))
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full, do_full, q_empty, do_empty = (
        new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES),
    )  # fmt: skip
    barriers = _Barriers(k_full, v_full, q_full, do_full, q_empty, do_empty)
    p_ring = Ring(p_bufs, new_barriers(STAGES), new_barriers(STAGES))
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(do_empty.index(stage), count=2)
        mbarrier.init(p_ring.full.index(stage), count=1)
        mbarrier.init(p_ring.empty.index(stage), count=1)
    tile_order = TileOrder(tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = Ranges(query_start_ptr, query_end_ptr, total_k)
    scale = Scale(softmax_scale, softcap)
    descs = Descriptors((q_desc,), (k_desc,), (v_desc,), (do_desc,), lse_delta_desc)
    inputs = Inputs(descs, stride_qh, stride_kh, stride_vh, stride_doh, padded_q)
    gl.warp_specialize([
        (_consume_dv, (dv_desc, marks_ptr, scale, buffers, barriers, p_ring, tile_order, ranges, HAS_SOFTCAP, GROUP,
                       TILES_PER_WORK_TILE)),
        (_consume_dk, (dk_desc, marks_ptr, scale, buffers, barriers, p_ring, tile_order, ranges, GROUP,
                       TILES_PER_WORK_TILE)),
        (_produce, (inputs, buffers, barriers, tile_order, ranges, GROUP, TILES_PER_WORK_TILE)),
    ], [4, 1], WORKER_REGISTERS)  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_delta: Tensor, marks: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv, which are contiguous and have the shapes and dtypes of k and v.

    head_dim must be 256, and descriptors.loadable must be True for q, k, v and do.
    lse_delta: as in dq_sum.Prepared.
    marks: the tensor to which the NaN marks of dk and dv are written (nan_isolation.new_marks), or None.
    Shapes: q and do (total_q, n_heads, head_dim); k and v (total_k, n_kv_heads, head_dim).
    """
    n_heads, (total_k, n_kv_heads, _) = q.shape[1], k.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    n_tiles = schedule.key_tiles.numel() * TILES_PER_WORK_TILE
    section = kv_heads_per_section(q, n_kv_heads, n_tiles, multiprocessors(q.device))
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc = (rows_of_heads(x, BLOCK) for x in (q, k, v, do, dk, dv))
    launch(
        _dkdv_kernel, (n_tiles * n_kv_heads,),
        q_desc, k_desc, v_desc, do_desc, elements(lse_delta, BLOCK), dk_desc, dv_desc, schedule.key_tiles,
        schedule.query_start, schedule.query_end, marks, features.softmax_scale, features.softcap,
        n_tiles, n_kv_heads, section, total_k, lse_delta.shape[-1], q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // n_kv_heads, STAGES=STAGES,
        TILES_PER_WORK_TILE=TILES_PER_WORK_TILE, WORKER_REGISTERS=WORKER_REGISTERS, num_warps=4,
        maxnreg=START_REGISTERS,
    )  # fmt: skip
    return dk, dv
