"""The consumer warpgroups of the forward kernel (kernel.py).

A consumer computes attention for 64 queries of an item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.hopper.forward import output, softmax
from fa_kernels.flash_attention.hopper.forward.items import Rings, posted_item, posted_visits
from fa_kernels.flash_attention.hopper.forward.output import Output
from fa_kernels.flash_attention.hopper.forward.softmax import HIDDEN, LN_2
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import pass_pingpong, wait_pingpong
from fa_kernels.flash_attention.hopper.primitives.columns import at, begin_scores_at
from fa_kernels.flash_attention.hopper.primitives.queue import Queue, field, read
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout
from fa_kernels.flash_attention.hopper.primitives.ring import place_of, wait_full
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale
from fa_kernels.flash_attention.structure import structure


@structure
class Work:
    """The values that all consumers of a program share."""

    out: Output
    lse: gl.tensor  # pointer
    sinks: gl.tensor  # pointer; used only if `HAS_SINKS` is true
    scale: Scale
    rings: Rings
    queue: Queue
    ranges: Ranges


@structure
class Queries:
    """A consumer's 64 queries, and the range of keys that each query sees."""

    q: tuple  # a tile for each column block of the head
    key_start: gl.tensor
    key_end: gl.tensor


@structure
class Running:
    """The state of a consumer between two blocks of keys: maxima and sums of its rows, o, and P of the previous block.

    `o` does not yet include P V of the previous block. Two values of P are packed into 32 bits, because the compiler
    would use a whole register for each bf16 value.
    """

    row_max: gl.tensor
    row_sum: gl.tensor
    o: tuple
    p: gl.tensor


@gluon.jit
def _begin_scores(q, k, stage):
    """Starts the matmul Q K^T. `stage` is the place of K in its ring buffer."""
    ROWS_EACH: gl.constexpr = q[0].shape[0]
    BLOCK_N: gl.constexpr = k.buffers[0].shape[1]
    zeros = gl.zeros([ROWS_EACH, BLOCK_N], gl.float32, layout=accumulator_layout(BLOCK_N))
    return begin_scores_at(q, k.buffers[0].index(stage), k.buffers, stage, zeros)


@gluon.jit
def _visit_first(
    block_number, key, begin, stop, running, queries, work, item_number, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Processes the first block of keys that this consumer visits.

    This function adds nothing to o, because there is no P V of an earlier block. The consumer visits the blocks from
    `begin` to `stop - 1`. If there is a second block, this function also waits until K of that block has arrived.
    """
    k, q = work.rings.k, queries.q
    CONSUMERS: gl.constexpr = work.rings.q.buffers[0].shape[0]
    STAGES: gl.constexpr = k.buffers[0].shape[0]
    dtype: gl.constexpr = q[0].dtype
    mbarrier.wait(work.rings.q.full.index(CONSUMER), item_number & 1)
    stage = block_number % STAGES
    wait_full(k.full, block_number)
    if CONFIG.pingpong:
        wait_pingpong(CONSUMER)
    scores_token = _begin_scores(q, k, stage)
    if CONFIG.pingpong:
        pass_pingpong(CONSUMER, CONSUMERS)
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    k.release(stage)
    scores = softmax.cap_and_mask(scores, work.scale, queries, key, True, dtype, HAS_SOFTCAP)
    exponentials = softmax.exponentials(
        scores, running.row_max, running.row_sum, work.scale.softmax, dtype, HAS_SOFTCAP, True
    )
    block_number += 1
    wait_full(k.full, block_number, pred=begin + 1 < stop)
    return block_number, Running(exponentials.row_max, exponentials.row_sum, running.o, exponentials.p)


@gluon.jit
def _visit(
    block_number, key, masked, more, running, queries, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Adds P V of the previous block to o, and computes P of the block of keys that begins with `key`.

    The caller has already waited for K of the block. `masked` says whether some of the queries do not see the whole
    block. If `more` is true, this function also waits until K of the next block has arrived.

    The order of operations in this function is chosen for ptxas. The function computes the exponentials, waits for the
    next K, and then waits for P V. The wait for K ends a basic block. Within a single basic block, ptxas would move the
    wait for P V above the exponentials, and the exponentials would not overlap with P V. If an accumulator were in
    flight at the end of a loop iteration, ptxas would serialise all matmuls (warnings C7512 and C7514).
    """
    k, v, q = work.rings.k, work.rings.v, queries.q
    CONSUMERS: gl.constexpr = work.rings.q.buffers[0].shape[0]
    STAGES: gl.constexpr = k.buffers[0].shape[0]
    dtype: gl.constexpr = q[0].dtype
    o = running.o
    stage, previous = block_number % STAGES, (block_number - 1) % STAGES
    operands = output.operands(running.p, o, q)
    if CONFIG.pingpong:
        wait_pingpong(CONSUMER)
    scores_token = _begin_scores(q, k, stage)
    wait_full(v.full, block_number - 1)
    o_tokens = output.begin_values(operands, v.buffers, previous, o)
    if CONFIG.pingpong:
        pass_pingpong(CONSUMER, CONSUMERS)
    if CONFIG.pv_first:
        values = output.wait_for((scores_token,) + o_tokens)  # noqa: RUF005  Gluon knows no stars
        scores, o = values[0], values[1:]
        v.release(previous)
    else:
        scores = warpgroup_mma_wait(len(o), deps=[scores_token])
    k.release(stage)
    scores = softmax.cap_and_mask(scores, work.scale, queries, key, masked, dtype, HAS_SOFTCAP)
    exponentials = softmax.exponentials(
        scores, running.row_max, running.row_sum, work.scale.softmax, dtype, HAS_SOFTCAP, CONFIG.max_first
    )
    block_number += 1
    wait_full(k.full, block_number, pred=more)
    if not CONFIG.pv_first:
        o = output.wait_for(o_tokens)
        v.release(previous)
    o = output.rescale(o, exponentials.factor)
    return block_number, Running(exponentials.row_max, exponentials.row_sum, o, exponentials.p)


@gluon.jit
def _visit_range(
    block_number, visits, end, running, queries, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Processes the blocks of keys that this consumer's own rows see, except the first block (`_visit_first`)."""
    BLOCK_N: gl.constexpr = work.rings.k.buffers[0].shape[1]
    for step in range(visits.begin + 1, visits.stop):
        key = end - (step + 1) * BLOCK_N
        masked = (step < visits.whole_begin) | (step >= visits.whole_stop)
        block_number, running = _visit(
            block_number, key, masked, step + 1 < visits.stop, running, queries, work, CONSUMER, CONFIG, HAS_SOFTCAP
        )
    return block_number, running


@gluon.jit
def _visit_all(
    block_number, item, running, queries, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr
):  # fmt: skip
    """Processes all blocks of an item except the first block (`_visit_first`). Blocks that need a mask come first."""
    BLOCK_N: gl.constexpr = work.rings.k.buffers[0].shape[1]
    n_masked = gl.maximum(item.n_right + item.n_left, 1)
    for step in range(1, n_masked):
        key = item.first_key(step, BLOCK_N)
        block_number, running = _visit(
            block_number, key, True, step + 1 < item.n_blocks, running, queries, work, CONSUMER, CONFIG, HAS_SOFTCAP
        )
    for step in range(n_masked, item.n_blocks):
        key = item.first_key(step, BLOCK_N)
        block_number, running = _visit(
            block_number, key, False, step + 1 < item.n_blocks, running, queries, work, CONSUMER, CONFIG, HAS_SOFTCAP
        )
    return block_number, running


@gluon.jit
def _pass_over(block_number, rings):
    """Waits for a block of K and V that this consumer does not visit, and releases the block.

    If this consumer did not wait, it could release the place of a block in the ring before the block is loaded.
    """
    STAGES: gl.constexpr = rings.k.buffers[0].shape[0]
    stage, phase = place_of(block_number, STAGES)
    rings.k.wait_full(stage, phase)
    rings.k.release(stage)
    rings.v.wait_full(stage, phase)
    rings.v.release(stage)
    return block_number + 1


@gluon.jit
def _consume_item(
    fields, item_number, block_number, q, to_log2, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Computes the attention of 64 queries of an item.

    item_number: the number of items that this program has already processed.
    block_number: the number of blocks that this program has processed in earlier items.
    to_log2: the result of softmax.scale_to_log2.
    Returns `block_number` plus the number of blocks in this item.
    """
    rings, ranges = work.rings, work.ranges
    ROWS_EACH: gl.constexpr = rings.q.buffers[0].shape[1]
    STAGES: gl.constexpr = rings.k.buffers[0].shape[0]
    BLOCK_N: gl.constexpr = rings.k.buffers[0].shape[1]
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    item = posted_item(fields, CONFIG.ranged)
    first = item.first + CONSUMER * ROWS_EACH
    row = first + gl.arange(0, ROWS_EACH, layout=ROW_LAYOUT)
    inside = row < ranges.total
    key_start = gl.load(ranges.start + row, mask=inside, other=0)
    key_end = gl.load(ranges.end + row, mask=inside, other=0)
    queries = Queries(q, key_start, key_end)
    sink = 0.0
    if HAS_SINKS:
        sink = gl.load(work.sinks + item.head) * LOG2_E / to_log2
    row_max, row_sum = softmax.begin(sink, ROWS_EACH, HAS_SINKS)
    running = Running(row_max, row_sum, output.no_output(q), None)
    if CONFIG.ranged:
        visits = posted_visits(fields, CONSUMER)
        key = item.end - (visits.begin + 1) * BLOCK_N
        for _ in range(visits.begin):
            block_number = _pass_over(block_number, rings)
        block_number, running = _visit_first(
            block_number, key, visits.begin, visits.stop, running, queries, work, item_number, CONSUMER, CONFIG,
            HAS_SOFTCAP,
        )  # fmt: skip
        block_number, running = _visit_range(
            block_number, visits, item.end, running, queries, work, CONSUMER, CONFIG, HAS_SOFTCAP
        )
    else:
        block_number, running = _visit_first(
            block_number, item.first_key(0, BLOCK_N), 0, item.n_blocks, running, queries, work, item_number, CONSUMER,
            CONFIG, HAS_SOFTCAP,
        )  # fmt: skip
        block_number, running = _visit_all(block_number, item, running, queries, work, CONSUMER, CONFIG, HAS_SOFTCAP)

    if not CONFIG.o_in_q:
        mbarrier.arrive(rings.q.empty.index(CONSUMER), count=1)
    stage = (block_number - 1) % STAGES
    operands = output.operands(running.p, running.o, q)
    wait_full(rings.v.full, block_number - 1)
    o = output.wait_for(output.begin_values(operands, rings.v.buffers, stage, running.o))
    rings.v.release(stage)
    if CONFIG.ranged:
        for _ in range(visits.stop, item.n_blocks):
            block_number = _pass_over(block_number, rings)

    row_max, row_sum = softmax.of_rows(running.row_max, running.row_sum, ROW_LAYOUT)
    # Without sinks, a row that sees no key keeps `row_max = HIDDEN`, and gets o = 0 and lse = -inf. A row whose
    # scores are all NaN also keeps `row_max = HIDDEN`, but its row_sum is NaN.
    sees = (row_max > 0.5 * HIDDEN) | (row_sum != row_sum)
    lse = gl.where(sees, (row_max * to_log2 + gl.log2(row_sum)) * LN_2, float("-inf"))
    gl.store(work.lse + item.head.to(gl.int64) * ranges.total + row, lse, mask=inside)
    output.store(o, row_sum, sees, first, item.head, ranges.total, work.out, CONSUMER)
    if CONFIG.o_in_q:
        tma.store_wait(0)
        mbarrier.arrive(rings.q.empty.index(CONSUMER), count=1)
    return block_number


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, work, CONFIG: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr
):  # fmt: skip
    """Runs a consumer warpgroup, which processes 64 queries of each item (a tile of queries of one head)."""
    CONSUMERS: gl.constexpr = work.rings.q.buffers[0].shape[0]
    q = at(work.rings.q.buffers, CONSUMER)
    to_log2 = softmax.scale_to_log2(work.scale.softmax, HAS_SOFTCAP)
    block_number = 0  # blocks are numbered over all items of the program, as in ring.py
    item_number = 0
    if CONSUMER == CONSUMERS - 1 and CONFIG.pingpong:
        pass_pingpong(CONSUMER, CONSUMERS)  # consumer 0 waits for this call before its first matmul
    fields = read(work.queue, item_number)
    while field(fields, 0) >= 0:
        block_number = _consume_item(
            fields, item_number, block_number, q, to_log2, work, CONSUMER, CONFIG, HAS_SINKS, HAS_SOFTCAP
        )
        item_number += 1
        fields = read(work.queue, item_number)
    tma.store_wait(0)
    if CONSUMER == 0 and CONFIG.pingpong:
        # The last consumer also calls `pass_pingpong` before its first item. Consumer 0 therefore receives one extra
        # signal after its last matmul.
        wait_pingpong(CONSUMER)
