"""Work items of the forward kernel, and the producer warp, which draws and posts items, and loads Q, K and V."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.primitives.columns import nbytes_of, start_load
from fa_kernels.flash_attention.hopper.primitives.queue import DRAWN_BEFORE, field, item_of, post, take
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, place_of
from fa_kernels.flash_attention.structure import structure


@structure
class Item:
    """A work item: a tile of queries of one head, beginning with query `first`, and the blocks of keys to process.

    Blocks are counted backwards: block 0 ends at key `end`. The first n_right blocks and the last n_left blocks need a
    mask, because some rows see only some keys of these blocks. All other blocks of the item need no mask, because every
    row sees all keys of these blocks. An item has at least one block, so that rows that see no key need no separate
    code.

    Example: queries 512 to 639 with a causal window of 320 keys, and BLOCK_N = 64. Query 512 sees keys 193 to 512, and
    query 639 sees keys 320 to 639. Then end = 640, n_blocks = 7, n_right = 2 and n_left = 2:

        first key of the block   192   256   320   384   448   512   576
        block                      6     5     4     3     2     1     0
        masked                   yes   yes    no    no    no   yes   yes
        visited at step            3     2     6     5     4     1     0
    """

    first: gl.tensor
    head: gl.tensor
    end: gl.tensor
    n_blocks: gl.tensor
    n_right: gl.tensor  # None if each consumer has its own `Visits`
    n_left: gl.tensor

    @gluon.jit
    def first_key(self, step, BLOCK_N: gl.constexpr):
        """Returns the first key of the block that is visited at `step`. Blocks that need a mask are visited first."""
        n_right, n_left = self.n_right, self.n_left
        whole = self.n_blocks - n_left - n_right
        block = gl.where(step < n_right, step, gl.where(step < n_right + n_left, step + whole, step - n_left))
        return self.end - (block + 1) * BLOCK_N


@structure
class Visits:
    """The blocks of an item that a consumer visits, from `begin` to `stop - 1`, counted as in `Item`.

    Blocks `whole_begin` to `whole_stop - 1` need no mask, because every row of the consumer sees all keys of these
    blocks. If every block of the consumer needs a mask, `whole_stop` is at most `whole_begin`.
    """

    begin: gl.tensor
    stop: gl.tensor
    whole_begin: gl.tensor
    whole_stop: gl.tensor


@structure
class Rings:
    """The ring buffers of Q (one place per consumer), K and V.

    Ring.buffers is a tuple with one entry per column block.
    """

    q: Ring
    k: Ring
    v: Ring


@structure
class Inputs:
    """The TMA descriptors of the producer's inputs, and the strides between heads.

    q, k and v are tuples with one TMA descriptor per column block.
    """

    q: tuple
    k: tuple
    v: tuple
    stride_qh: gl.tensor
    stride_kh: gl.tensor
    stride_vh: gl.tensor
    group: gl.tensor  # query heads per KV head


@gluon.jit
def _locate_item(index, tile_order, ranges, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the work item with the given index. `ranges` holds the range of keys that each query sees."""
    tile, head = tile_order.locate(index)
    first = tile * BLOCK_M
    last = gl.minimum(first + BLOCK_M, ranges.total) - 1
    start, last_start = gl.load(ranges.start + first), gl.load(ranges.start + last)
    first_end, end = gl.load(ranges.end + first), gl.load(ranges.end + last)
    n_blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
    n_right = gl.minimum(gl.cdiv(end - first_end, BLOCK_N), n_blocks)
    n_left = n_blocks - gl.maximum((end - last_start) // BLOCK_N, n_right)
    return Item(first, head, end, n_blocks, n_right, n_left)


@gluon.jit
def _visits_of_rows(first, item, ranges, BLOCK_N: gl.constexpr):
    """Returns the fields of `Visits` for rows `first` to `first + 63`.

    Rows after the last query are treated like the last query.
    """
    first = gl.minimum(first, ranges.total - 1)
    last = gl.minimum(first + 64, ranges.total) - 1
    start, last_start = gl.load(ranges.start + first), gl.load(ranges.start + last)
    first_end, last_end = gl.load(ranges.end + first), gl.load(ranges.end + last)
    begin = gl.minimum((item.end - last_end) // BLOCK_N, item.n_blocks - 1)
    stop = gl.maximum(gl.cdiv(item.end - start, BLOCK_N), begin + 1)
    return begin, stop, gl.cdiv(item.end - first_end, BLOCK_N), (item.end - last_start) // BLOCK_N


@gluon.jit
def _post_item(queue, item_number, item, ranges, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, RANGED: gl.constexpr):
    """Posts a work item for the consumers. With `RANGED`, the fields of an item include `Visits` of each consumer."""
    if RANGED:
        fields = (item.first, item.head, item.end, item.n_blocks)
        for consumer in gl.static_range(CONSUMERS):
            fields = fields + _visits_of_rows(item.first + consumer * 64, item, ranges, BLOCK_N)
        post(queue, item_number, fields)
    else:
        post(queue, item_number, (item.first, item.head, item.end, item.n_blocks, item.n_right, item.n_left))


@gluon.jit
def posted_item(fields, RANGED: gl.constexpr):
    """Returns the item that `_post_item` has posted. `fields` is the result of queue.read."""
    n_right, n_left = None, None
    if not RANGED:
        n_right, n_left = field(fields, 4), field(fields, 5)
    return Item(field(fields, 0), field(fields, 1), field(fields, 2), field(fields, 3), n_right, n_left)


@gluon.jit
def posted_visits(fields, CONSUMER: gl.constexpr):
    """Returns the `Visits` that `_post_item` has posted for consumer `CONSUMER`."""
    FIRST: gl.constexpr = 4 + 4 * CONSUMER
    return Visits(field(fields, FIRST), field(fields, FIRST + 1), field(fields, FIRST + 2), field(fields, FIRST + 3))


@gluon.jit
def _load(ring, place, descs, row, column):
    """Starts to fill a place of a ring buffer by TMA."""
    full = ring.full.index(place)
    mbarrier.expect(full, nbytes_of(descs))
    start_load(descs, row, column, full, ring.buffers, place)


@gluon.jit
def produce(inputs, rings, queue, counter_ptr, n_items, tile_order, ranges, CONFIG: gl.constexpr):
    """Runs the producer warp. For each work item, the producer warp loads Q, and then the blocks of K and V."""
    CONSUMERS: gl.constexpr = rings.q.buffers[0].shape[0]
    ROWS_EACH: gl.constexpr = rings.q.buffers[0].shape[1]
    STAGES: gl.constexpr = rings.k.buffers[0].shape[0]
    BLOCK_N: gl.constexpr = rings.k.buffers[0].shape[1]
    block_number = 0  # blocks are numbered over all items of the program, as in ring.py
    item_number = 0
    index = gl.program_id(0)
    while index < n_items:
        item = _locate_item(index, tile_order, ranges, ROWS_EACH * CONSUMERS, BLOCK_N)
        _post_item(queue, item_number, item, ranges, CONSUMERS, BLOCK_N, CONFIG.ranged)
        draw_at = gl.maximum(item.n_blocks - DRAWN_BEFORE, 0)
        ticket = 0
        for consumer in gl.static_range(CONSUMERS):  # each consumer has its own mbarrier for Q, to start early
            mbarrier.wait(rings.q.empty.index(consumer), item_number & 1 ^ 1)
            row = item.first + consumer * ROWS_EACH
            _load(rings.q, consumer, inputs.q, row, item.head * inputs.stride_qh)
        for step in range(item.n_blocks):
            if step == draw_at:
                ticket = take(counter_ptr)
            if CONFIG.ranged:
                key = item.end - (step + 1) * BLOCK_N
            else:
                key = item.first_key(step, BLOCK_N)
            stage, phase = place_of(block_number, STAGES)
            empty = phase ^ 1  # as in Ring.wait_empty
            mbarrier.wait(rings.k.empty.index(stage), empty)
            _load(rings.k, stage, inputs.k, key, item.head // inputs.group * inputs.stride_kh)
            mbarrier.wait(rings.v.empty.index(stage), empty)
            _load(rings.v, stage, inputs.v, key, item.head // inputs.group * inputs.stride_vh)
            block_number += 1
        item_number += 1
        index = item_of(ticket, counter_ptr, n_items)
    post(queue, item_number, (-1,))
