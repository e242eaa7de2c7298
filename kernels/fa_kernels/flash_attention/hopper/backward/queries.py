"""A Hopper kernel for dQ at head_dim 128 and 256.

One program computes dQ of 128 queries of one head. A producer warp loads Q and dO once by TMA, and then loads blocks of
K and V by TMA. Two consumer warpgroups own 64 queries each. A consumer computes scores and dS of its queries, and adds
dS K to dQ. The matmul dS K reads dS from registers. Exactly one program writes each output, so every run gives the same
bits. The kernel of keys.py or wide.py computes dK and dV before the kernel for dQ runs. Both the kernel for dQ and the
kernel for dK and dV compute the scores.

The table gives lower bounds on the time for one block of scores, in cycles of one multiprocessor. The bounds are
computed from the throughputs in wide.py. At head_dim 128, a block of scores has 128 queries and 128 keys. At head_dim
256, a block of scores has 128 queries and 64 keys. A soft cap doubles the time of the exponentials.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP, hand_back, meet
from fa_kernels.flash_attention.hopper.primitives.columns import new_buffer
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout, keep_columns, operand_layout
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, new_barriers, wait_empty, wait_full
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale, TileOrder
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.structure import structure
from fa_kernels.flash_attention.tile_order import heads_per_section
from fa_kernels.launch.descriptors import rows_of_heads
from fa_kernels.launch.record import launch

BLOCK_M = WORK_TILE // 2  # queries of a warpgroup
# All warps start with `START_REGISTERS` registers per thread. The second consumer then changes to 240 registers per
# thread, and the producer to 24 (`WORKER_REGISTERS`). The first consumer gets the remaining 240 registers per thread.
START_REGISTERS, WORKER_REGISTERS = 168, (240, 24)


@dataclass(frozen=True)
class QueryTiles:
    """The tile sizes for one head_dim."""

    block_n: int  # keys per step
    v_stages: int  # the number of blocks of V that can be in shared memory at once
    arrivals: int  # how many threads (1 or all 128) of a warpgroup signal that K or V was read


K_STAGES = 2  # the number of blocks of K that can be in shared memory at once
TILES = {  # {head_dim: tile sizes}; the kernel uses 192 KiB of shared memory at head_dim 128, and 224 KiB at 256
    128: QueryTiles(128, v_stages=2, arrivals=WARPGROUP.value),
    256: QueryTiles(64, v_stages=1, arrivals=1),
}


@structure
class _Item:
    """A work item: queries of one head, beginning with query `first`.

    The queries see n_blocks blocks of keys, beginning with key `start`.
    """

    first: gl.tensor
    head: gl.tensor
    start: gl.tensor
    n_blocks: gl.tensor


@structure
class _Inputs:
    """The TMA descriptors of the inputs that the producer warp loads, and the strides between heads."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    do: gl.tensor
    stride_qh: gl.tensor
    stride_kh: gl.tensor
    stride_vh: gl.tensor
    stride_doh: gl.tensor


@structure
class _Buffers:
    """The buffers of Q and dO [2, M, D], with one place per consumer, and the rings of K and V [stages, N, D]."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k: Ring
    v: Ring


@structure
class _Rows:
    """Pointers to lse, delta and NaN marks of the queries."""

    lse: gl.tensor
    delta: gl.tensor
    marks: gl.tensor  # NaN marks (nan_marks.py), or None


@structure
class _Queries:
    """A consumer's 64 queries of one head, with the values that every step uses.

    Every query sees all keys from `whole_start` to `whole_end - 1`, so blocks of these keys need no mask.
    """

    first: gl.tensor
    head: gl.tensor
    q: gl.shared_memory_descriptor  # [M, D]
    do: gl.shared_memory_descriptor
    lse: gl.tensor  # [M, 1], the log-sum-exp of each query's scores in log2 units
    delta: gl.tensor  # [M, 1]
    key_start: gl.tensor  # [M]; a query sees the keys from `key_start` to `key_end - 1`
    key_end: gl.tensor
    whole_start: gl.tensor
    whole_end: gl.tensor


@gluon.jit
def _locate_item(tile_order, ranges, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the work item of this program."""
    tile, head = tile_order.locate(gl.program_id(0))
    first = tile * ROWS
    last = gl.minimum(first + ROWS, ranges.total) - 1
    start = gl.load(ranges.start + first)
    end = gl.load(ranges.end + last)
    return _Item(first, head, start, gl.maximum(end - start + BLOCK_N - 1, 0) // BLOCK_N)


@gluon.jit
def _produce(inputs, buffers, tile_order, ranges, GROUP: gl.constexpr):
    """Runs the producer warp, which loads Q and dO for each consumer, and then the blocks of K and V of the item."""
    BLOCK_M: gl.constexpr = buffers.q.shape[1]
    K_STAGES: gl.constexpr = buffers.k.buffers.shape[0]
    V_STAGES: gl.constexpr = buffers.v.buffers.shape[0]
    BLOCK_N: gl.constexpr = buffers.k.buffers.shape[1]
    BYTES: gl.constexpr = 2 * buffers.k.buffers.shape[2]  # bytes per row
    item = _locate_item(tile_order, ranges, 2 * BLOCK_M, BLOCK_N)
    kv_head, key = item.head // GROUP, item.start
    for consumer in gl.static_range(2):
        row = item.first + consumer * BLOCK_M
        full = buffers.q_full.index(consumer)
        mbarrier.expect(full, 2 * BLOCK_M * BYTES)
        tma.async_copy_global_to_shared(inputs.q, [row, item.head * inputs.stride_qh], full, buffers.q.index(consumer))
        tma.async_copy_global_to_shared(
            inputs.do, [row, item.head * inputs.stride_doh], full, buffers.do.index(consumer)
        )  # fmt: skip
    for step in range(item.n_blocks):
        k_stage, v_stage = step % K_STAGES, step % V_STAGES
        k_full, v_full = buffers.k.full.index(k_stage), buffers.v.full.index(v_stage)
        wait_empty(buffers.k.empty, step)
        mbarrier.expect(k_full, BLOCK_N * BYTES)
        tma.async_copy_global_to_shared(
            inputs.k, [key, kv_head * inputs.stride_kh], k_full, buffers.k.buffers.index(k_stage)
        )  # fmt: skip
        wait_empty(buffers.v.empty, step)
        mbarrier.expect(v_full, BLOCK_N * BYTES)
        tma.async_copy_global_to_shared(
            inputs.v, [key, kv_head * inputs.stride_vh], v_full, buffers.v.buffers.index(v_stage)
        )  # fmt: skip
        key += BLOCK_N


@gluon.jit
def _release(ring, stage, ARRIVALS: gl.constexpr):
    """Signals that this warpgroup has read the place `stage` of a ring.

    `ARRIVALS` is the number of threads in the warpgroup that arrive at the mbarrier.
    """
    if ARRIVALS == 1:
        mbarrier.arrive(ring.empty.index(stage), count=1)
    else:
        hand_back(ring.empty.index(stage))


@gluon.jit
def _load_queries(item, CONSUMER: gl.constexpr, of_rows, buffers, ranges):
    """Returns the queries of this consumer. The loads of Q and dO may still be in flight."""
    BLOCK_M: gl.constexpr = buffers.q.shape[1]
    BLOCK_N: gl.constexpr = buffers.k.buffers.shape[1]
    first = item.first + CONSUMER * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, accumulator_layout(BLOCK_N)))
    inside = rows < ranges.total
    key_start = gl.load(ranges.start + rows, mask=inside, other=0)
    key_end = gl.load(ranges.end + rows, mask=inside, other=0)
    # Rows that see no key, and rows past the last query, get lse = inf, so that P = 2^(score - inf) and dQ are 0.
    row_offset = item.head.to(gl.int64) * ranges.total
    lse = gl.load(of_rows.lse + row_offset + rows, mask=inside, other=float("-inf"))
    lse = gl.expand_dims(gl.where(lse == float("-inf"), float("inf"), lse * LOG2_E), 1)
    delta = gl.expand_dims(gl.load(of_rows.delta + row_offset + rows, mask=inside, other=0.0), 1)
    last = gl.minimum(first + BLOCK_M, ranges.total) - 1
    whole_start = gl.load(ranges.start + last)
    whole_end = gl.load(ranges.end + gl.minimum(first, last))
    q, do = buffers.q.index(CONSUMER), buffers.do.index(CONSUMER)
    return _Queries(first, item.head, q, do, lse, delta, key_start, key_end, whole_start, whole_end)


@gluon.jit
def _probabilities(scores, key, queries, scale, HAS_SOFTCAP: gl.constexpr):
    """Computes P [M, N] of the block of keys that begins with `key`.

    With a soft cap, P is multiplied by the derivative of the soft cap, because dS needs this product.
    """
    BLOCK_N: gl.constexpr = scores.shape[1]
    if HAS_SOFTCAP:
        scores, t = cap(scores, scale.softmax, scale.softcap, queries.q.dtype)
        p = gl.exp2(scores - queries.lse)
        p = p * (1.0 - t * t)
    else:
        p = gl.exp2(scores * (scale.softmax * LOG2_E) - queries.lse)
    if (key < queries.whole_start) | (key + BLOCK_N > queries.whole_end):
        p = keep_columns(p, queries.key_start - key, queries.key_end - key, 0.0)
    return p


@gluon.jit
def _add_block(dq, step, key, queries, k_ring, v_ring, scale, HAS_SOFTCAP: gl.constexpr, ARRIVALS: gl.constexpr):
    """Adds dS K of one block of keys to dQ. `key` is the first key of the block."""
    K_STAGES: gl.constexpr = k_ring.buffers.shape[0]
    V_STAGES: gl.constexpr = v_ring.buffers.shape[0]
    BLOCK_M: gl.constexpr = dq.shape[0]
    BLOCK_N: gl.constexpr = k_ring.buffers.shape[1]
    dtype: gl.constexpr = queries.q.dtype
    k_stage, v_stage = step % K_STAGES, step % V_STAGES
    k, v = k_ring.buffers.index(k_stage), v_ring.buffers.index(v_stage)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=accumulator_layout(BLOCK_N))
    wait_full(k_ring.full, step)
    scores = warpgroup_mma(queries.q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [M, N]
    wait_full(v_ring.full, step)
    dp = warpgroup_mma(queries.do, v.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p = _probabilities(scores, key, queries, scale, HAS_SOFTCAP)
    dp = warpgroup_mma_wait(0, deps=[dp])
    _release(v_ring, v_stage, ARRIVALS)
    ds = (p * (dp - queries.delta)).to(dtype)
    dq = warpgroup_mma(gl.convert_layout(ds, operand_layout(dq.shape[1])), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    _release(k_ring, k_stage, ARRIVALS)
    return dq


@gluon.jit
def _store(dq, queries, scale, dq_desc):
    """Stores dQ in global memory by TMA, through this consumer's shared-memory buffer of Q."""
    meet()  # waits until all warps of this consumer have read Q
    queries.q.store((dq * scale.softmax).to(queries.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [queries.first, queries.head * dq.shape[1]], queries.q)
    tma.store_wait(0)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, dq_desc, of_rows, scale, buffers, tile_order, ranges, HAS_SOFTCAP: gl.constexpr,
    ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Runs a consumer warpgroup, which computes dQ of 64 queries of the item."""
    BLOCK_M: gl.constexpr = buffers.q.shape[1]
    BLOCK_N: gl.constexpr = buffers.k.buffers.shape[1]
    D: gl.constexpr = buffers.k.buffers.shape[2]
    item = _locate_item(tile_order, ranges, 2 * BLOCK_M, BLOCK_N)
    key = item.start
    queries = _load_queries(item, CONSUMER, of_rows, buffers, ranges)
    dq = gl.zeros([BLOCK_M, D], gl.float32, layout=accumulator_layout(D))
    mbarrier.wait(buffers.q_full.index(CONSUMER), 0)
    for step in range(item.n_blocks):
        dq = _add_block(dq, step, key, queries, buffers.k, buffers.v, scale, HAS_SOFTCAP, ARRIVALS)
        key += BLOCK_N
    if of_rows.marks is not None:
        mark_rows((dq,), queries.first, item.head, ranges.total, of_rows.marks, CONSUMER)
    _store(dq, queries, scale, dq_desc)


@gluon.jit(do_not_specialize=(
    "n_tiles", "n_heads", "section", "total_q", "stride_qh", "stride_kh", "stride_vh", "stride_doh"
))  # fmt: skip
def _dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc,
    lse_ptr, delta_ptr, tiles_ptr, key_start_ptr, key_end_ptr, marks_ptr, softmax_scale, softcap,
    n_tiles, n_heads, section, total_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """A work item is dQ of 128 queries of one head. Program i processes work item i.

    marks_ptr: the pointer to the NaN marks of dQ (nan_marks.py), or None.
    """
    q_bufs, do_bufs = new_buffer(q_desc, 2), new_buffer(do_desc, 2)
    k_bufs, v_bufs = new_buffer(k_desc, K_STAGES), new_buffer(v_desc, V_STAGES)
    q_full = new_barriers(2)
    k_ring = Ring(k_bufs, new_barriers(K_STAGES), new_barriers(K_STAGES))
    v_ring = Ring(v_bufs, new_barriers(V_STAGES), new_barriers(V_STAGES))
    for consumer in gl.static_range(2):
        mbarrier.init(q_full.index(consumer), count=1)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_ring.full.index(stage), count=1)
        mbarrier.init(k_ring.empty.index(stage), count=2 * ARRIVALS)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_ring.full.index(stage), count=1)
        mbarrier.init(v_ring.empty.index(stage), count=2 * ARRIVALS)
    buffers = _Buffers(q_bufs, do_bufs, q_full, k_ring, v_ring)
    inputs = _Inputs(q_desc, k_desc, v_desc, do_desc, stride_qh, stride_kh, stride_vh, stride_doh)
    tile_order = TileOrder(tiles_ptr, n_tiles, n_heads, section)
    ranges = Ranges(key_start_ptr, key_end_ptr, total_q)
    of_rows = _Rows(lse_ptr, delta_ptr, marks_ptr)
    scale = Scale(softmax_scale, softcap)
    gl.warp_specialize([
        (_consume, (0, dq_desc, of_rows, scale, buffers, tile_order, ranges, HAS_SOFTCAP, ARRIVALS)),
        (_consume, (1, dq_desc, of_rows, scale, buffers, tile_order, ranges, HAS_SOFTCAP, ARRIVALS)),
        (_produce, (inputs, buffers, tile_order, ranges, GROUP)),
    ], [4, 1], WORKER_REGISTERS)  # fmt: skip


def gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, marks: Tensor | None,
    schedule: Schedule, features: Features,
) -> Tensor:  # fmt: skip
    """Returns dq, which is contiguous and has the shape and dtype of q.

    head_dim must be 128 or 256, and descriptors.loadable must be True for q, k, v and do.
    marks: the tensor to which the NaN marks of dq are written (nan_isolation.new_marks), or None.
    Shapes: q and do (total_q, n_heads, head_dim); k and v (total_k, n_kv_heads, head_dim); lse and delta (n_heads,
    total_q) fp32.
    """
    total_q, n_heads, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = TILES[head_dim]
    operands = (q, BLOCK_M), (k, tiles.block_n), (v, tiles.block_n), (do, BLOCK_M), (dq, BLOCK_M)
    n_tiles = schedule.query_tiles.numel()
    launch(
        _dq_kernel, (n_tiles * n_heads,),
        *[rows_of_heads(x, block) for x, block in operands], lse, delta, schedule.query_tiles, schedule.key_start,
        schedule.key_end, marks, features.softmax_scale, features.softcap, n_tiles, n_heads,
        heads_per_section(k, v, n_heads), total_q, q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // k.shape[1], K_STAGES=K_STAGES, V_STAGES=tiles.v_stages,
        ARRIVALS=tiles.arrivals, WORKER_REGISTERS=WORKER_REGISTERS, num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip
    return dq
