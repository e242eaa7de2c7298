"""dQ alone, for Hopper: one owner of each output, nothing added in memory, so repeatable.

One producer warp loads Q and dO once, then blocks of K and V, through TMA; two warpgroups hold 64 queries each, with
scores of their own, and feed dS to dQ = dS K from registers. At head_dim 256, and wherever gradients must be the same
bits in every run, it follows a kernel of dK and dV (bwd_keys.py, bwd_wide.py), which computes the scores too.
A head_dim of 96 is worked as 64 columns and 32, as in bwd_keys.py.

A program works one item, 128 queries of a head, or, if its tiles are dynamic, takes items from a queue (queue.py). Q
and dO then have two places: those of the next item are loaded while this one is worked, and dQ leaves through its
item's own.

What binds, for 128 queries x 128 keys (cycles of one SM, as bwd_wide.py counts them; at 256, for 128 x 64):

| head_dim | tensor cores | shared memory | exponentials |
|:---------|-------------:|--------------:|-------------:|
| 64       | 1536         | 1280          | 1024         |
| 96       | 2304         | 1920          | 1024         |
| 128      | 3072         | 2560          | 1024         |
| 256      | 3072         | 3072          | 512          |

A soft cap doubles the exponentials, less what POLYNOMIALS take of them.

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

from kernels.flash_attention.features import Features
from kernels.flash_attention.hopper.barriers import WARPGROUP, hand_back, meet
from kernels.flash_attention.hopper.columns import keep_columns
from kernels.flash_attention.hopper.descriptors import parts_of_heads
from kernels.flash_attention.hopper.exponentials import exp2
from kernels.flash_attention.hopper.marks import mark_rows
from kernels.flash_attention.hopper.queue import (
    DRAWN_BEFORE,
    field,
    five_fields,
    item_of,
    new_queue,
    post,
    programs_of,
    read,
    take,
)
from kernels.flash_attention.portable.launch import heads_per_section, tile_and_head
from kernels.flash_attention.portable.load import split_width
from kernels.flash_attention.replay import launch
from kernels.flash_attention.schedule import WORK_TILE, Schedule
from kernels.flash_attention.scores import cap

BLOCK_M = WORK_TILE // 2  # queries of a warpgroup
# of a thread when a kernel starts; then of one in the second consumer and of one in the producer's warps, which leave
# 240 of 64K to the first consumer's
THREAD_REGISTERS, REGISTERS = 168, (240, 24)


@dataclass(frozen=True)
class QueryTiles:
    """block_n keys a step; stages of K and of V in flight, of which V is done with first; dynamic: items from a queue.

    arrivals: of a warpgroup that has read K or V, from one thread for all or each. One is faster at 256 alone: both
    passes at 16k 456 TFLOP/s for 432, at 64 411 for 419, at 128 463 for 469.
    """

    block_n: int
    k_stages: int
    v_stages: int
    dynamic: bool
    arrivals: int = WARPGROUP.value


# by head_dim; 193, 193, 192 and 224 KiB of shared memory
TILES = {
    64: QueryTiles(128, 4, 4, dynamic=True),
    96: QueryTiles(128, 2, 2, dynamic=True),
    128: QueryTiles(128, 2, 2, dynamic=False),
    256: QueryTiles(64, 2, 1, dynamic=False, arrivals=1),
}
# by head_dim: of 8 exponentials in bf16 under a soft cap, whose tanh takes the exponential unit too. With four heads a
# KV head 32k take at 64 14.8 ms for 17.1, at 96 11.4 for 12.2; at 128 one gains nothing, and fp16 5% at most (run 34)
POLYNOMIALS = {64: 1, 96: 2}


def polynomials_of(head_dim: int, dtype: torch.dtype, softcap: float) -> int:
    """POLYNOMIALS of the kernel."""
    return POLYNOMIALS.get(head_dim, 0) if softcap and dtype == torch.bfloat16 else 0


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
def _load(descs, row, column, barrier, bufs, rest_bufs, INDEX, D_2: gl.constexpr):
    """Starts to load rows of one head: of both parts of its columns where there are two."""
    tma.async_copy_global_to_shared(descs[0], [row, column], barrier, bufs.index(INDEX))
    if D_2:
        tma.async_copy_global_to_shared(descs[1], [row, column], barrier, rest_bufs.index(INDEX))


@gluon.jit
def _produce_item(found, turn, done, counter_ptr, q_descs, k_descs, v_descs, do_descs, strides, buffers,
                  D_2: gl.constexpr):  # fmt: skip
    """One warp: loads each consumer's queries of an item, then its blocks of K and of V.

    The item is the program's number `turn`, and `done` the blocks of those before it. Returns a ticket for another, if
    counter_ptr is not None.
    """
    stride_qh, stride_kh, stride_vh, stride_doh = strides
    q_bufs, do_bufs, k_bufs, v_bufs = buffers[0]
    q_2_bufs, do_2_bufs, k_2_bufs, v_2_bufs = buffers[1]
    q_full, q_empty, k_full, v_full, k_empty, v_empty = buffers[2]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    ITEMS: gl.constexpr = q_bufs.shape[0] // 2
    K_STAGES: gl.constexpr = k_bufs.shape[0]
    V_STAGES: gl.constexpr = v_bufs.shape[0]
    BYTES: gl.constexpr = 2 * (k_bufs.shape[2] + D_2)  # of one row
    first, head, kv_head, key, n_blocks = found
    for consumer in gl.static_range(2):
        row = first + consumer * BLOCK_M
        place = turn % ITEMS * 2 + consumer
        here = q_full.index(place)
        if counter_ptr is not None:
            mbarrier.wait(q_empty.index(place), (turn // ITEMS) & 1 ^ 1)
        mbarrier.expect(here, 2 * BLOCK_M * BYTES)
        _load(q_descs, row, head * stride_qh, here, q_bufs, q_2_bufs, place, D_2)
        _load(do_descs, row, head * stride_doh, here, do_bufs, do_2_bufs, place, D_2)
    ticket = 0
    draw_at = done + gl.maximum(n_blocks - DRAWN_BEFORE, 0)
    if counter_ptr is not None:
        if n_blocks == 0:
            ticket = take(counter_ptr)
    for step in range(done, done + n_blocks):
        if counter_ptr is not None:
            if step == draw_at:
                ticket = take(counter_ptr)
        k_stage, v_stage = step % K_STAGES, step % V_STAGES
        k_here, v_here = k_full.index(k_stage), v_full.index(v_stage)
        mbarrier.wait(k_empty.index(k_stage), (step // K_STAGES) & 1 ^ 1)
        mbarrier.expect(k_here, BLOCK_N * BYTES)
        _load(k_descs, key, kv_head * stride_kh, k_here, k_bufs, k_2_bufs, k_stage, D_2)
        mbarrier.wait(v_empty.index(v_stage), (step // V_STAGES) & 1 ^ 1)
        mbarrier.expect(v_here, BLOCK_N * BYTES)
        _load(v_descs, key, kv_head * stride_vh, v_here, v_bufs, v_2_bufs, v_stage, D_2)
        key += BLOCK_N
    return ticket


@gluon.jit
def _produce(q_descs, k_descs, v_descs, do_descs, strides, buffers, order, ranges, queue, counter_ptr, n_items,
             GROUP: gl.constexpr, D_2: gl.constexpr):  # fmt: skip
    """One warp: `_produce_item` of the program's item, or of every item that it takes if there is a queue."""
    ROWS: gl.constexpr = 2 * buffers[0][0].shape[1]
    BLOCK_N: gl.constexpr = buffers[0][2].shape[1]
    if queue is None:
        found = _walk(gl.program_id(0), order, ranges, GROUP, ROWS, BLOCK_N)
        _produce_item(found, 0, 0, counter_ptr, q_descs, k_descs, v_descs, do_descs, strides, buffers, D_2)
    else:
        turn, done = 0, 0
        item = gl.program_id(0)
        while item < n_items:
            found = _walk(item, order, ranges, GROUP, ROWS, BLOCK_N)
            post(queue, turn, found)
            ticket = _produce_item(
                found, turn, done, counter_ptr, q_descs, k_descs, v_descs, do_descs, strides, buffers, D_2
            )  # fmt: skip
            done += found[4]
            turn += 1
            item = item_of(ticket, counter_ptr, n_items)
        post(queue, turn, (-1,))


@gluon.jit
def _hand_back(empty, ARRIVALS: gl.constexpr):
    if ARRIVALS == 1:
        mbarrier.arrive(empty, count=1)
    else:
        hand_back(empty)


@gluon.jit
def _consume_item(found, turn, done, CONSUMER: gl.constexpr, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers,
                  ranges, HAS_SOFTCAP: gl.constexpr, D_2: gl.constexpr, ARRIVALS: gl.constexpr,
                  POLYNOMIALS: gl.constexpr):  # fmt: skip
    """Four warps: dQ of 64 queries of an item, dS from registers; returns the blocks done.

    found: what `_walk` finds of the program's item number `turn`; done: the blocks of the items before it.
    """
    softmax_scale, softcap = scale
    q_bufs, do_bufs, k_bufs, v_bufs = buffers[0]
    q_2_bufs, do_2_bufs, k_2_bufs, v_2_bufs = buffers[1]
    q_full, q_empty, k_full, v_full, k_empty, v_empty = buffers[2]
    ITEMS: gl.constexpr = q_bufs.shape[0] // 2
    key_start_ptr, key_end_ptr, total_q = ranges
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    D_1: gl.constexpr = k_bufs.shape[2]
    K_STAGES: gl.constexpr = k_bufs.shape[0]
    V_STAGES: gl.constexpr = v_bufs.shape[0]
    PARTS: gl.constexpr = 2 if D_2 else 1  # matmuls of which one operation of a head is made
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    dtype: gl.constexpr = q_bufs.dtype
    first, head, _, key, n_blocks = found
    stop = done + n_blocks
    place = turn % ITEMS * 2 + CONSUMER
    first += CONSUMER * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    inside = rows < total_q
    key_start = gl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = gl.load(key_end_ptr + rows, mask=inside, other=0)
    # 2^(score - inf) is 0: a row that sees nothing, or is none, takes no part
    row_offset = head.to(gl.int64) * total_q
    lse = gl.load(lse_ptr + row_offset + rows, mask=inside, other=float("-inf"))
    lse = gl.expand_dims(gl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634), 1)
    delta = gl.expand_dims(gl.load(delta_ptr + row_offset + rows, mask=inside, other=0.0), 1)
    # a block between these needs no mask: ranges only move forwards from query to query
    last = gl.minimum(first + BLOCK_M, total_q) - 1
    whole_start = gl.load(key_start_ptr + last)
    whole_end = gl.load(key_end_ptr + gl.minimum(first, last))
    q, do = q_bufs.index(place), do_bufs.index(place)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    dq = gl.zeros([BLOCK_M, D_1], gl.float32, layout=OUT)
    if D_2:
        q_2, do_2 = q_2_bufs.index(place), do_2_bufs.index(place)
        OUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2, 16])
        OPERAND_2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT_2, k_width=2)
        dq_2 = gl.zeros([BLOCK_M, D_2], gl.float32, layout=OUT_2)
    mbarrier.wait(q_full.index(place), (turn // ITEMS) & 1)
    if ITEMS > 1:
        if turn > 0:  # by now dQ of the item before has left
            tma.store_wait(0)
            hand_back(q_empty.index((turn - 1) % ITEMS * 2 + CONSUMER))
    for step in range(done, stop):
        k_stage, v_stage = step % K_STAGES, step % V_STAGES
        k, v = k_bufs.index(k_stage), v_bufs.index(v_stage)
        mbarrier.wait(k_full.index(k_stage), (step // K_STAGES) & 1)
        scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [M, N]
        if D_2:
            k_2, v_2 = k_2_bufs.index(k_stage), v_2_bufs.index(v_stage)
            scores = warpgroup_mma(q_2, k_2.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(v_full.index(v_stage), (step // V_STAGES) & 1)
        dp = warpgroup_mma(do, v.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if D_2:
            dp = warpgroup_mma(do_2, v_2.permute((1, 0)), dp, is_async=True)
        scores = warpgroup_mma_wait(PARTS, deps=[scores])
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            p = exp2(scores - lse, POLYNOMIALS)
            p = p * (1.0 - t * t)
        else:
            p = gl.exp2(scores * (softmax_scale * 1.4426950408889634) - lse)
        if (key < whole_start) | (key + BLOCK_N > whole_end):
            p = keep_columns(p, key_start - key, key_end - key, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        _hand_back(v_empty.index(v_stage), ARRIVALS)
        ds = (p * (dp - delta)).to(dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, OPERAND), k, dq, is_async=True)
        if D_2:
            dq_2 = warpgroup_mma(gl.convert_layout(ds, OPERAND_2), k_2, dq_2, is_async=True)
            dq, dq_2 = warpgroup_mma_wait(0, deps=[dq, dq_2])
        else:
            dq = warpgroup_mma_wait(0, deps=[dq])
        _hand_back(k_empty.index(k_stage), ARRIVALS)
        key += BLOCK_N
    if spoiled_ptr is not None:
        mark_rows(dq, dq_2 if D_2 else None, first, head, total_q, spoiled_ptr, CONSUMER)
    # dQ leaves through Q's buffer, which only this consumer reads: when all its warps have
    meet()
    q.store((dq * softmax_scale).to(dtype))
    if D_2:
        q_2.store((dq_2 * softmax_scale).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_descs[0], [first, head * (D_1 + D_2)], q)
    if D_2:
        tma.async_copy_shared_to_global(dq_descs[1], [first, head * (D_1 + D_2)], q_2)
    return stop


@gluon.jit
def _consume(CONSUMER: gl.constexpr, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges, queue,
             HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, ARRIVALS: gl.constexpr,
             POLYNOMIALS: gl.constexpr):  # fmt: skip
    """`_consume_item` of the program's item, or of every item of the queue if there is one."""
    ROWS: gl.constexpr = 2 * buffers[0][0].shape[1]
    BLOCK_N: gl.constexpr = buffers[0][2].shape[1]
    if queue is None:
        found = _walk(gl.program_id(0), order, ranges, GROUP, ROWS, BLOCK_N)
        _consume_item(found, 0, 0, CONSUMER, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, ranges,
                      HAS_SOFTCAP, D_2, ARRIVALS, POLYNOMIALS)  # fmt: skip
    else:
        turn, done = 0, 0
        item = read(queue, turn)
        while field(item, 0) >= 0:
            found = five_fields(item)
            done = _consume_item(
                found, turn, done, CONSUMER, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, ranges,
                HAS_SOFTCAP, D_2, ARRIVALS, POLYNOMIALS,
            )  # fmt: skip
            turn += 1
            item = read(queue, turn)
    tma.store_wait(0)


@gluon.jit
def _buffers(q_desc, do_desc, k_desc, v_desc, ITEMS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Shared memory for two consumers' Q and dO of each of ITEMS, and for the stages of K and V."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = q_desc.block_type.shape[1]
    q_bufs = gl.allocate_shared_memory(dtype, [2 * ITEMS, BLOCK_M, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [2 * ITEMS, BLOCK_M, D], do_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [K_STAGES, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [V_STAGES, BLOCK_N, D], v_desc.layout)
    return q_bufs, do_bufs, k_bufs, v_bufs


@gluon.jit(do_not_specialize=(
    "n_items", "n_tiles", "n_heads", "section", "total_q", "stride_qh", "stride_kh", "stride_vh", "stride_doh"
))  # fmt: skip
def _dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, q_2_desc, k_2_desc, v_2_desc, do_2_desc, dq_2_desc,
    lse_ptr, delta_ptr, counter_ptr, tiles_ptr, key_start_ptr, key_end_ptr, spoiled_ptr, softmax_scale, softcap,
    n_items, n_tiles, n_heads, section, total_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr, POLYNOMIALS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """An item: dQ of 128 queries of one head. Program i works item i, and then others if there is a counter.

    Descriptors of the first columns of each head, and with a 2 of the D_2 after them (None where D_2 is 0).
    spoiled_ptr is None, or where to mark NaN in dQ (marks.py).
    """
    ITEMS: gl.constexpr = 1 if counter_ptr is None else 2
    bufs = _buffers(q_desc, do_desc, k_desc, v_desc, ITEMS, K_STAGES, V_STAGES)
    rest_bufs, queue = bufs, None  # rest_bufs are not read where D_2 is 0
    if D_2:
        rest_bufs = _buffers(q_2_desc, do_2_desc, k_2_desc, v_2_desc, ITEMS, K_STAGES, V_STAGES)
    if counter_ptr is not None:
        queue = new_queue(2)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * ITEMS, 1], mbarrier.MBarrierLayout())
    q_empty = q_full  # in the place of barriers that one item does not need (barriers.py)
    if counter_ptr is not None:
        q_empty = gl.allocate_shared_memory(gl.int64, [2 * ITEMS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2 * ITEMS):
        mbarrier.init(q_full.index(place), count=1)
        if counter_ptr is not None:
            mbarrier.init(q_empty.index(place), count=WARPGROUP)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2 * ARRIVALS)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2 * ARRIVALS)
    buffers = (bufs, rest_bufs, (q_full, q_empty, k_full, v_full, k_empty, v_empty))
    order = (tiles_ptr, n_tiles, n_heads, section)
    ranges = (key_start_ptr, key_end_ptr, total_q)
    scale = (softmax_scale, softcap)
    strides = (stride_qh, stride_kh, stride_vh, stride_doh)
    dq_descs = (dq_desc, dq_2_desc)
    gl.warp_specialize([
        (_consume, (0, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges, queue, HAS_SOFTCAP,
                    GROUP, D_2, ARRIVALS, POLYNOMIALS)),
        (_consume, (1, dq_descs, lse_ptr, delta_ptr, spoiled_ptr, scale, buffers, order, ranges, queue, HAS_SOFTCAP,
                    GROUP, D_2, ARRIVALS, POLYNOMIALS)),
        (_produce, ((q_desc, q_2_desc), (k_desc, k_2_desc), (v_desc, v_2_desc), (do_desc, do_2_desc), strides, buffers,
                    order, ranges, queue, counter_ptr, n_items, GROUP, D_2)),
    ], [4, 1], REGISTERS)  # fmt: skip


def gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, spoiled: Tensor | None,
    schedule: Schedule, features: Features,
) -> Tensor:  # fmt: skip
    """do like o, lse and delta (n_heads, total_q) fp32 -> dq, dense, in the dtype of q; the same bits in every run.

    For a head_dim in TILES, and rows that descriptors.loadable takes. spoiled (portable.launch.new_marks) gets the
    marks of NaN in dq.
    """
    total_q, n_heads, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = TILES[head_dim]
    descs, rest = parts_of_heads((q, BLOCK_M), (k, tiles.block_n), (v, tiles.block_n), (do, BLOCK_M), (dq, BLOCK_M))
    n_tiles = schedule.query_tiles.numel()
    n_items = n_tiles * n_heads
    programs, counter = programs_of(n_items, q.device, tiles.dynamic)
    launch(
        _dq_kernel, (programs,),
        *descs, *rest, lse, delta, counter, schedule.query_tiles, schedule.key_start, schedule.key_end, spoiled,
        features.softmax_scale, features.softcap, n_items, n_tiles, n_heads, heads_per_section(k, v, n_heads), total_q,
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // k.shape[1], D_2=split_width(head_dim)[1],
        K_STAGES=tiles.k_stages, V_STAGES=tiles.v_stages, ARRIVALS=tiles.arrivals,
        POLYNOMIALS=polynomials_of(head_dim, q.dtype, features.softcap),
        REGISTERS=REGISTERS, num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
    return dq
