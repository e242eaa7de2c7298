"""Work items of the backward kernels for dK and dV: the steps of an item, the buffers and the producer warp.

A work item is 128 keys of one KV head. To compute dK and dV of an item, a program visits all queries that see the
item's keys, in each query head that shares the KV head. A step of an item is one block of queries of one head. By
default, steps visit all blocks of one head, and then all blocks of the next head. With `DESCENDING` (dq_order.py),
steps visit the blocks from the last to the first, and visit all heads for each block.

A program processes one item, or draws items from a queue (queue.py). fused.py uses everything in this file; keys.py and
wide.py use parts of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP
from fa_kernels.flash_attention.hopper.primitives.columns import nbytes_of, new_buffer, start_load
from fa_kernels.flash_attention.hopper.primitives.queue import DRAWN_BEFORE, field, item_of, post, take
from fa_kernels.flash_attention.hopper.primitives.registers import keep_columns
from fa_kernels.flash_attention.hopper.primitives.ring import new_barriers, wait_empty
from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.flash_attention.structure import structure

BLOCK_N = WORK_TILE  # keys of an item, 64 for each of two consumer warpgroups
SUM_BLOCK = 64  # the sum of dQ is stored in blocks of 64 queries and at most 64 columns
# Kernel arguments that Triton must not specialise on, because they differ from call to call.
SIZES = (
    "n_items", "n_tiles", "n_kv_heads", "section", "total_k", "padded_q",
    "stride_qh", "stride_kh", "stride_vh", "stride_doh",
)  # fmt: skip


@structure
class Item:
    """A work item: keys of a KV head, beginning with key `first`.

    Only the queries from `start` to `end - 1` can see the item's keys.
    """

    first: gl.tensor
    kv_head: gl.tensor
    start: gl.tensor  # the first query, rounded down to a multiple of `ALIGNMENT`
    end: gl.tensor
    n_steps: gl.tensor


@structure
class Descriptors:
    """TMA descriptors of the inputs. Each tuple has one entry per column block of a head."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple
    lse_delta: gl.tensor  # a vector that holds lse of all heads, then delta of all heads


@structure
class Inputs:
    """The TMA descriptors of the inputs that the producer warp loads, and the strides between heads."""

    descs: Descriptors
    stride_qh: gl.tensor
    stride_kh: gl.tensor
    stride_vh: gl.tensor
    stride_doh: gl.tensor
    padded: gl.tensor  # the number of lse values per head, with padding


@structure
class Buffers:
    """The shared-memory buffers for Q and dO of each step, and for K and V of each item.

    Tuples have one entry per column block.
    """

    q: tuple  # [STAGES, M, columns]
    do: tuple
    lse: gl.shared_memory_descriptor  # [STAGES, M]
    delta: gl.shared_memory_descriptor
    k: tuple  # [ITEMS, N, columns]
    v: tuple


@structure
class Barriers:
    """The mbarriers of `Buffers`.

    kv_full and kv_empty hold one mbarrier for each of the `ITEMS` places for K and V. q_full, do_full and empty hold
    one mbarrier for each of the `STAGES` places for Q and dO.
    """

    kv_full: gl.shared_memory_descriptor  # signals that K and V have arrived in shared memory
    kv_empty: gl.shared_memory_descriptor  # signals that TMA has read dK and dV from the buffers of K and V
    q_full: gl.shared_memory_descriptor  # signals that Q and lse have arrived
    do_full: gl.shared_memory_descriptor  # signals that dO and delta have arrived
    empty: gl.shared_memory_descriptor  # signals that both consumers have read Q and dO


@structure
class Visible:
    """For each key of a block, the queries that see the key: start <= query < end.

    Queries with whole_start <= query < whole_end see all keys of the block.
    """

    start: gl.tensor
    end: gl.tensor
    whole_start: gl.tensor
    whole_end: gl.tensor


@gluon.jit
def locate_item(
    index, tile_order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Returns the work item with the given index. `ranges` holds the range of queries that see each key.

    The first query of the item is rounded down to a multiple of `ALIGNMENT`, so that TMA can load lse and delta of a
    step. The fused kernel sums dQ in blocks of queries, so each step must also begin at the first query
    of such a block.
    """
    tile, kv_head = tile_order.locate(index)
    first = tile * BLOCK_N
    last = gl.minimum(first + BLOCK_N, ranges.total) - 1
    start = gl.load(ranges.start + first) // ALIGNMENT * ALIGNMENT
    end = gl.load(ranges.end + last)
    return Item(first, kv_head, start, end, gl.maximum(end - start + BLOCK_M - 1, 0) // BLOCK_M * GROUP)


@gluon.jit
def posted_item(fields):
    """Returns the work item whose fields the producer has posted in the queue."""
    return Item(field(fields, 0), field(fields, 1), field(fields, 2), field(fields, 3), field(fields, 4))


@gluon.jit
def first_step(item, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, DESCENDING: gl.constexpr = False):
    """Returns the first query of an item's first step, and the query head of this step.

    With `DESCENDING`, item.start must be a multiple of `BLOCK_M`.
    """
    m = item.start
    if DESCENDING:  # computing m from the number of steps would take one more register
        m = (item.end - 1) // BLOCK_M * BLOCK_M
    return m, item.kv_head * GROUP


@gluon.jit
def next_step(m, head, item, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, DESCENDING: gl.constexpr = False):
    """Returns the first query and the head of the next step.

    By default, the next step is the next block of queries of the same head. The last block of a head is followed by the
    first block of the next head. With `DESCENDING`, the next step is the same block of the next head. After the last
    head, the next step is the preceding block of the first head.
    """
    if DESCENDING:
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
        wraps = m >= item.end
        head = gl.where(wraps, head + 1, head)
        m = gl.where(wraps, item.start, m)
    return m, head


@gluon.jit
def visible_queries(ranges, first, KEYS: gl.constexpr, layout: gl.constexpr):
    """Returns the range of queries that see each key, for `KEYS` keys from key `first` onwards.

    `start` and `end` of the result have the layout `layout`. Blocks of queries between whole_start and whole_end need
    no mask, because their queries see all `KEYS` keys.
    """
    keys = first + gl.arange(0, KEYS, layout=layout)
    # Past the last key, TMA loads zeros, and P = 2^(0 - lse) might overflow. Positions after the last key therefore get
    # an empty range of queries.
    start = gl.load(ranges.start + keys, mask=keys < ranges.total, other=0x7FFFFFFF)
    end = gl.load(ranges.end + keys, mask=keys < ranges.total, other=0)
    last = first + KEYS - 1
    whole_start = gl.load(ranges.start + last, mask=last < ranges.total, other=0x7FFFFFFF)
    whole_end = gl.load(ranges.end + first, mask=first < ranges.total, other=0)
    return Visible(start, end, whole_start, whole_end)


@gluon.jit
def hide(p, visible, m):
    """Returns p with 0 where a query does not see a key. p is P^T [keys, queries], and its first query is `m`."""
    if (m < visible.whole_start) | (m + p.shape[1] > visible.whole_end):
        p = keep_columns(p, visible.start - m, visible.end - m, 0.0)
    return p


@gluon.jit
def new_buffers(descs, STAGES: gl.constexpr, ITEMS: gl.constexpr):
    """Allocates the shared-memory buffers for the first column block of a head."""
    BLOCK_M: gl.constexpr = descs.q[0].block_type.shape[0]
    q, do = new_buffer(descs.q[0], STAGES), new_buffer(descs.do[0], STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], descs.lse_delta.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], descs.lse_delta.layout)
    k, v = new_buffer(descs.k[0], ITEMS), new_buffer(descs.v[0], ITEMS)
    return Buffers((q,), (do,), lse, delta, (k,), (v,))


@gluon.jit
def with_all_columns(buffers, descs):
    """Returns `buffers` with additional buffers for the other column blocks of a head."""
    STAGES: gl.constexpr = buffers.lse.shape[0]
    ITEMS: gl.constexpr = buffers.k[0].shape[0]
    q, do, k, v = buffers.q, buffers.do, buffers.k, buffers.v
    for i in gl.static_range(1, len(descs.q)):
        q += (new_buffer(descs.q[i], STAGES),)
        do += (new_buffer(descs.do[i], STAGES),)
        k += (new_buffer(descs.k[i], ITEMS),)
        v += (new_buffer(descs.v[i], ITEMS),)
    return Buffers(q, do, buffers.lse, buffers.delta, k, v)


@gluon.jit
def new_item_barriers(STAGES: gl.constexpr, ITEMS: gl.constexpr):
    """Returns initialised mbarriers.

    TMA arrives at `kv_full`, `q_full` and `do_full`. All threads of both consumers arrive at `kv_empty` and `empty`. If
    `ITEMS` is 1, nothing waits for kv_empty. A kernel must use every mbarrier that it allocates (barriers.py), so
    kv_empty is the same mbarrier as kv_full if `ITEMS` is 1.
    """
    kv_full = new_barriers(ITEMS)
    kv_empty = kv_full
    if ITEMS > 1:
        kv_empty = new_barriers(ITEMS)
    q_full = new_barriers(STAGES)
    do_full = new_barriers(STAGES)
    empty = new_barriers(STAGES)
    for i in gl.static_range(ITEMS):
        mbarrier.init(kv_full.index(i), count=1)
        if ITEMS > 1:
            mbarrier.init(kv_empty.index(i), count=2 * WARPGROUP)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 * WARPGROUP)
    return Barriers(kv_full, kv_empty, q_full, do_full, empty)


@gluon.jit
def load_keys(inputs, buffers, kv_full, place, item):
    """Starts to load K and V of an item by TMA."""
    full = kv_full.index(place)
    mbarrier.expect(full, 2 * nbytes_of(inputs.descs.k))
    for i in gl.static_range(len(buffers.k)):
        k, v = (inputs.descs.k[i],), (inputs.descs.v[i],)
        start_load(k, item.first, item.kv_head * inputs.stride_kh, full, (buffers.k[i],), place)
        start_load(v, item.first, item.kv_head * inputs.stride_vh, full, (buffers.v[i],), place)


@gluon.jit
def load_step(inputs, delta_start, buffers, barriers, stage, m, head):
    """Starts to load Q, dO, lse and delta of one step by TMA.

    delta_start: the index at which delta begins in the vector `lse_delta`.
    """
    BYTES: gl.constexpr = nbytes_of(inputs.descs.q) + inputs.descs.lse_delta.block_type.nbytes
    q_full, do_full = barriers.q_full.index(stage), barriers.do_full.index(stage)
    row = head * inputs.padded + m
    mbarrier.expect(q_full, BYTES)
    start_load(inputs.descs.q, m, head * inputs.stride_qh, q_full, buffers.q, stage)
    tma.async_copy_global_to_shared(inputs.descs.lse_delta, [row], q_full, buffers.lse.index(stage))
    mbarrier.expect(do_full, BYTES)
    start_load(inputs.descs.do, m, head * inputs.stride_doh, do_full, buffers.do, stage)
    tma.async_copy_global_to_shared(inputs.descs.lse_delta, [delta_start + row], do_full, buffers.delta.index(stage))


@gluon.jit
def _produce_item(
    item,
    item_number,
    done,
    counter_ptr,
    inputs,
    delta_start,
    buffers,
    barriers,
    GROUP: gl.constexpr,
    DESCENDING: gl.constexpr,
):
    """Fills the buffers for one item, in the order in which the consumers empty them. One warp calls this function.

    item_number: the number of items that this program has already loaded.
    done: the number of steps of all earlier items of this program.
    Returns `done` plus the number of steps of this item, and a ticket for the next item of this program (queue.py). The
    ticket is 0 if counter_ptr is None.
    """
    STAGES: gl.constexpr = buffers.q[0].shape[0]
    BLOCK_M: gl.constexpr = buffers.q[0].shape[1]
    ITEMS: gl.constexpr = buffers.k[0].shape[0]
    m, head = first_step(item, GROUP, BLOCK_M, DESCENDING)
    place = item_number % ITEMS
    if counter_ptr is not None:
        wait_empty(barriers.kv_empty, item_number)
    load_keys(inputs, buffers, barriers.kv_full, place, item)
    # with a queue, one extra iteration draws the next item's number (the ticket) even if this item has no steps
    DRAWS: gl.constexpr = 0 if counter_ptr is None else 1
    draw_at = gl.maximum(item.n_steps - DRAWN_BEFORE, 0)
    ticket = 0
    for step in range(item.n_steps + DRAWS):
        if DRAWS:
            if step == draw_at:
                ticket = take(counter_ptr)
        if step < item.n_steps:
            wait_empty(barriers.empty, done)
            load_step(inputs, delta_start, buffers, barriers, done % STAGES, m, head)
            m, head = next_step(m, head, item, GROUP, BLOCK_M, DESCENDING)
            done += 1
    return done, ticket


@gluon.jit
def produce(
    inputs, delta_start, buffers, barriers, tile_order, ranges, queue, counter_ptr, n_items, GROUP: gl.constexpr,
    ALIGNMENT: gl.constexpr, DESCENDING: gl.constexpr = False,
):  # fmt: skip
    """Runs the producer warp: it draws and loads items until none is left, or loads one item if there is no queue."""
    BLOCK_M: gl.constexpr = buffers.q[0].shape[1]
    BLOCK_N: gl.constexpr = buffers.k[0].shape[1]
    if queue is None:
        item = locate_item(gl.program_id(0), tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _produce_item(item, 0, gl.to_tensor(0), counter_ptr, inputs, delta_start, buffers, barriers, GROUP, DESCENDING)
    else:
        item_number, done = 0, 0
        index = gl.program_id(0)
        while index < n_items:
            item = locate_item(index, tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
            post(queue, item_number, (item.first, item.kv_head, item.start, item.end, item.n_steps))
            done, ticket = _produce_item(
                item, item_number, done, counter_ptr, inputs, delta_start, buffers, barriers, GROUP, DESCENDING
            )
            item_number += 1
            index = item_of(ticket, counter_ptr, n_items)
        post(queue, item_number, (-1,))
