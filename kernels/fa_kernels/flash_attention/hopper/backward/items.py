"""What the backward kernels of 128 keys an item share: an item's steps, their buffers, and how they are loaded.

An item is 128 keys of one KV head, and a step a block of queries of one head. An item visits those that see its keys,
head by head of a KV head's group, or from the last to the first, each for all heads (BACKWARDS, for order.py). A
program works one item, or takes items from a queue (queue.py). fused.py has all of it, keys.py what one
item a program needs, wide.py the order of the steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP
from fa_kernels.flash_attention.hopper.primitives.queue import DRAWN_BEFORE, item_of, post, take
from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.flash_attention.tile_order import tile_and_head

BLOCK_N = WORK_TILE  # keys of an item, 64 for each of two warpgroups
SUM_BLOCK = 64  # rows of dQ, and at most columns, that one warpgroup adds at a time
# arguments that differ from call to call, for which nothing is compiled anew
SIZES = (
    "n_items", "n_tiles", "n_kv_heads", "section", "total_k", "padded_q",
    "stride_qh", "stride_kh", "stride_vh", "stride_doh",
)  # fmt: skip


@gluon.jit
def decode(
    item, order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ALIGNMENT: gl.constexpr
):  # fmt: skip
    """An item's first key, its KV head, the first query to visit, where they end, and the number of steps."""
    tiles_ptr, n_tiles, n_kv_heads, section = order
    query_start_ptr, query_end_ptr, total_k = ranges
    tile, kv_head = tile_and_head(item, tiles_ptr, n_tiles, n_kv_heads, section, 1)
    first = tile * BLOCK_N
    last = gl.minimum(first + BLOCK_N, total_k) - 1
    start = gl.load(query_start_ptr + first) // ALIGNMENT * ALIGNMENT
    end = gl.load(query_end_ptr + last)
    n_steps = gl.maximum(end - start + BLOCK_M - 1, 0) // BLOCK_M * GROUP
    return first, kv_head, start, end, n_steps


@gluon.jit
def first_step(found, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BACKWARDS: gl.constexpr):
    """The block of queries and the head with which an item begins, of which `decode` found so much.

    Backwards BLOCK_M must be `decode`'s ALIGNMENT.
    """
    _, kv_head, m, end, _ = found
    if BACKWARDS:  # not out of the number of steps, or LLVM keeps that in one more register
        m = (end - 1) // BLOCK_M * BLOCK_M
    return m, kv_head * GROUP


@gluon.jit
def next_step(
    m, head, start, end, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BACKWARDS: gl.constexpr = False
):  # fmt: skip
    """The block of queries after m; after a head's last one, the first of the next head.

    Or backwards: the same block of the next head; after the group's last head, the block before m.
    """
    if BACKWARDS:
        if GROUP > 1:
            head += 1
            wraps = head % GROUP == 0
            head = gl.where(wraps, head - GROUP, head)
            m = gl.where(wraps, m - BLOCK_M, m)
        else:
            m -= BLOCK_M
        return m, head
    m += BLOCK_M
    if GROUP > 1:
        wraps = m >= end
        head = gl.where(wraps, head + 1, head)
        m = gl.where(wraps, start, m)
    return m, head


@gluon.jit
def product(a, b):
    """a b in bf16, two at a time: Triton would multiply in fp32 and round."""
    gl.static_assert(a.dtype == gl.bfloat16 and b.dtype == gl.bfloat16)
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.bfloat16, True, 2)


@gluon.jit
def seen_by(ranges, first, KEYS: gl.constexpr, layout: gl.constexpr):
    """Where the queries that see each of KEYS keys from `first` on start and end, and where those that see all do.

    A step between the latter two needs no mask: ranges only move forwards from key to key, except past the last one.
    """
    query_start_ptr, query_end_ptr, total_k = ranges
    keys = first + gl.arange(0, KEYS, layout=layout)
    # keys past the last one are seen by no query: their P would be 2^-lse, without bound
    query_start = gl.load(query_start_ptr + keys, mask=keys < total_k, other=0x7FFFFFFF)
    query_end = gl.load(query_end_ptr + keys, mask=keys < total_k, other=0)
    last = first + KEYS - 1
    whole_start = gl.load(query_start_ptr + last, mask=last < total_k, other=0x7FFFFFFF)
    whole_end = gl.load(query_end_ptr + first, mask=first < total_k, other=0)
    return query_start, query_end, whole_start, whole_end


@gluon.jit
def new_buffers(q_desc, k_desc, v_desc, do_desc, rows_desc, STAGES: gl.constexpr, ITEMS: gl.constexpr):
    """Q and dO [STAGES, M, D], lse and delta [STAGES, M], K and V [ITEMS, N, D] of a program."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = q_desc.block_type.shape[1]
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], do_desc.layout)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], rows_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], rows_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [ITEMS, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [ITEMS, BLOCK_N, D], v_desc.layout)
    return q_bufs, do_bufs, lse_bufs, delta_bufs, k_bufs, v_bufs


@gluon.jit
def new_rest_buffers(q_2_desc, k_2_desc, v_2_desc, do_2_desc, STAGES: gl.constexpr, ITEMS: gl.constexpr):
    """Those of the columns after the first: Q and dO [STAGES, M, D_2], K and V [ITEMS, N, D_2]."""
    dtype: gl.constexpr = q_2_desc.dtype
    BLOCK_M: gl.constexpr = q_2_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_2_desc.block_type.shape[0]
    D_2: gl.constexpr = q_2_desc.block_type.shape[1]
    q_2_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_2], q_2_desc.layout)
    do_2_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_2], do_2_desc.layout)
    k_2_bufs = gl.allocate_shared_memory(dtype, [ITEMS, BLOCK_N, D_2], k_2_desc.layout)
    v_2_bufs = gl.allocate_shared_memory(dtype, [ITEMS, BLOCK_N, D_2], v_2_desc.layout)
    return q_2_bufs, do_2_bufs, k_2_bufs, v_2_bufs


@gluon.jit
def new_barriers(STAGES: gl.constexpr, ITEMS: gl.constexpr):
    """Of each place of K and V that they are there and, where there are two, that it is free. One has no such barrier
    (barriers.py says why not), and kv_full in its place.

    Of each stage that Q and lse are there, that dO and delta are, and that it is free. TMA tells what is there, all
    threads of both consumers what is free.
    """
    kv_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    kv_empty = kv_full
    if ITEMS > 1:
        kv_empty = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ITEMS):
        mbarrier.init(kv_full.index(i), count=1)
        if ITEMS > 1:
            mbarrier.init(kv_empty.index(i), count=2 * WARPGROUP)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 * WARPGROUP)
    return kv_full, kv_empty, q_full, do_full, empty


@gluon.jit
def load_keys(loads, buffers, rest_bufs, kv_full, place, first, kv_head):
    """Starts to load K and V of an item; rest_bufs None, or of the columns that are parts of their own."""
    descs, rest_descs, _, strides, _, _ = loads
    _, stride_kh, stride_vh, _ = strides
    _, k_desc, v_desc, _ = descs
    _, _, _, _, k_bufs, v_bufs = buffers
    BYTES: gl.constexpr = k_desc.block_type.nbytes + (rest_descs[1].block_type.nbytes if rest_bufs is not None else 0)
    full = kv_full.index(place)
    mbarrier.expect(full, 2 * BYTES)
    tma.async_copy_global_to_shared(k_desc, [first, kv_head * stride_kh], full, k_bufs.index(place))
    tma.async_copy_global_to_shared(v_desc, [first, kv_head * stride_vh], full, v_bufs.index(place))
    if rest_bufs is not None:
        _, k_2_desc, v_2_desc, _ = rest_descs
        _, _, k_2_bufs, v_2_bufs = rest_bufs
        tma.async_copy_global_to_shared(k_2_desc, [first, kv_head * stride_kh], full, k_2_bufs.index(place))
        tma.async_copy_global_to_shared(v_2_desc, [first, kv_head * stride_vh], full, v_2_bufs.index(place))


@gluon.jit
def load_step(loads, buffers, rest_bufs, barriers, stage, m, head):
    """Starts to load Q, dO, lse and delta of one step into an empty stage."""
    descs, rest_descs, rows_desc, strides, padded_q, delta_rows = loads
    stride_qh, _, _, stride_doh = strides
    q_desc, _, _, do_desc = descs
    q_bufs, do_bufs, lse_bufs, delta_bufs, _, _ = buffers
    _, _, q_full, do_full, _ = barriers
    BYTES: gl.constexpr = q_desc.block_type.nbytes + (rest_descs[0].block_type.nbytes if rest_bufs is not None else 0)
    q_here, do_here = q_full.index(stage), do_full.index(stage)
    row = head * padded_q + m
    mbarrier.expect(q_here, BYTES + rows_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [m, head * stride_qh], q_here, q_bufs.index(stage))
    if rest_bufs is not None:
        tma.async_copy_global_to_shared(rest_descs[0], [m, head * stride_qh], q_here, rest_bufs[0].index(stage))
    tma.async_copy_global_to_shared(rows_desc, [row], q_here, lse_bufs.index(stage))
    mbarrier.expect(do_here, BYTES + rows_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [m, head * stride_doh], do_here, do_bufs.index(stage))
    if rest_bufs is not None:
        tma.async_copy_global_to_shared(rest_descs[3], [m, head * stride_doh], do_here, rest_bufs[1].index(stage))
    tma.async_copy_global_to_shared(rows_desc, [delta_rows + row], do_here, delta_bufs.index(stage))


@gluon.jit
def _produce_item(
    found, turn, done, counter_ptr, loads, buffers, rest_bufs, barriers, GROUP: gl.constexpr, BACKWARDS: gl.constexpr
):
    """One warp: fills the buffers for one item, in the order in which the consumers empty them.

    The item is the program's number `turn`, and `done` the steps of those before it. Returns those done with it, and a
    ticket for another item if counter_ptr is not None.
    """
    STAGES: gl.constexpr = buffers[0].shape[0]
    BLOCK_M: gl.constexpr = buffers[0].shape[1]
    ITEMS: gl.constexpr = buffers[4].shape[0]
    kv_full, kv_empty, _, _, empty = barriers
    first, kv_head, start, end, n_steps = found
    m, head = first_step(found, GROUP, BLOCK_M, BACKWARDS)
    place = turn % ITEMS
    if counter_ptr is not None:
        mbarrier.wait(kv_empty.index(place), (turn // ITEMS) & 1 ^ 1)
    load_keys(loads, buffers, rest_bufs, kv_full, place, first, kv_head)
    DRAWS: gl.constexpr = 0 if counter_ptr is None else 1  # a turn more, because an item may have no step
    draw_at = gl.maximum(n_steps - DRAWN_BEFORE, 0)
    ticket = 0
    for step in range(n_steps + DRAWS):
        if DRAWS:
            if step == draw_at:
                ticket = take(counter_ptr)
        if step < n_steps:
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), (done // STAGES) & 1 ^ 1)
            load_step(loads, buffers, rest_bufs, barriers, stage, m, head)
            m, head = next_step(m, head, start, end, GROUP, BLOCK_M, BACKWARDS)
            done += 1
    return done, ticket


@gluon.jit
def produce(
    loads, buffers, rest_bufs, barriers, order, ranges, queue, counter_ptr, n_items, GROUP: gl.constexpr,
    ALIGNMENT: gl.constexpr, BACKWARDS: gl.constexpr = False,
):  # fmt: skip
    """One warp: `_produce_item` of the program's item, or of every item that it takes if there is a queue."""
    BLOCK_M: gl.constexpr = buffers[0].shape[1]
    BLOCK_N: gl.constexpr = buffers[4].shape[1]
    if queue is None:
        found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _produce_item(found, 0, gl.to_tensor(0), counter_ptr, loads, buffers, rest_bufs, barriers, GROUP, BACKWARDS)
    else:
        turn, done = 0, 0
        item = gl.program_id(0)
        while item < n_items:
            found = decode(item, order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
            post(queue, turn, found)
            done, ticket = _produce_item(
                found, turn, done, counter_ptr, loads, buffers, rest_bufs, barriers, GROUP, BACKWARDS
            )
            turn += 1
            item = item_of(ticket, counter_ptr, n_items)
        post(queue, turn, (-1,))
