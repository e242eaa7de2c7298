"""The dQ warpgroup of the fused backward kernel (fused.py).

The warpgroup computes dQ = dS K, and adds dQ to an fp32 sum in global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.flash_attention.hopper.backward.dq_order import note_added
from fa_kernels.flash_attention.hopper.backward.items import first_step, locate_item, next_step, posted_item
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import tma_reduce_add
from fa_kernels.flash_attention.hopper.primitives.columns import at, width_of
from fa_kernels.flash_attention.hopper.primitives.queue import field, read
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout, in_order_of_threads
from fa_kernels.flash_attention.hopper.primitives.ring import place_of, wait_full
from fa_kernels.flash_attention.structure import structure

TILES_IN_FLIGHT = gl.constexpr(2)  # how many tiles of dQ may be on the way to global memory


@structure
class DqSum:
    """The sum of dQ for one column block of each head."""

    desc: gl.tensor  # TMA descriptor of the sum of dQ in global memory
    buffers: gl.shared_memory_descriptor  # tiles of dQ on the way to global memory: [places, rows, 32] or [rows, 32]


@gluon.jit
def _add_item(item, item_number, done, sums, ds, k_bufs, kv_full, n_heads, dq_order, GROUP: gl.constexpr):
    """Computes dQ of each step of an item, and adds dQ to the sum in global memory.

    item_number: the number of items that this program has already processed.
    done: the number of steps of all earlier items of this program.
    dq_order: the mbarriers of dq_order.py, or None if the order of additions may vary.
    Returns `done` plus the number of steps of this item.
    """
    DS_STAGES: gl.constexpr = ds.buffers.shape[0]
    BLOCK_M: gl.constexpr = ds.buffers.shape[2]
    ITEMS: gl.constexpr = k_bufs[0].shape[0]
    m, head = first_step(item, GROUP, BLOCK_M, dq_order is not None)
    stop = done + item.n_steps
    k = at(k_bufs, item_number % ITEMS)
    # An item without steps must not wait for K, because K of a later item may already be in the same buffer.
    wait_full(kv_full, item_number, pred=item.n_steps > 0)
    for number in range(done, stop):  # steps are numbered over all items of the program, as in ring.py
        stage, phase = place_of(number, DS_STAGES)
        ds_tile = ds.buffers.index(stage)  # [N, M]
        if dq_order is not None:
            mbarrier.wait(dq_order.due.index(stage), phase)
        ds.wait_full(stage, phase)
        _add_step(number, m, head, sums, ds, ds_tile, stage, k, n_heads)
        if dq_order is not None:  # waits until TMA has added dQ of the previous step, but not for dQ of this step
            note_added(dq_order, number - 1, _pieces_of(sums, BLOCK_M, k))
        m, head = next_step(m, head, item, GROUP, BLOCK_M, dq_order is not None)
    if dq_order is not None:
        note_added(dq_order, stop - 1, 0)
    return stop


@gluon.constexpr_function
def _pieces_of(sums, block_m, k):
    """Returns how many tiles of dQ one step adds to the sum."""
    rows = sums[0].buffers.shape[1] // 2
    across = sum(tile.shape[1] // (part.buffers.shape[-2] // 2) for part, tile in zip(sums, k, strict=True))
    return block_m // rows * across


@gluon.jit
def _add_step(number, m, head, sums, ds, ds_tile, stage, k, n_heads):
    """Adds dQ of one step to the sum, and releases the step's dS in the ring buffer after the last matmul."""
    ROWS: gl.constexpr = sums[0].buffers.shape[1] // 2  # queries in a tile of dQ
    for i in gl.static_range(len(k)):
        _add_columns(
            number, m, head, sums[i].desc, sums[i].buffers, ds, ds_tile, stage, k[i], n_heads, ROWS, width_of(k),
            width_of(k[:i]), i == len(k) - 1,
        )  # fmt: skip


@gluon.jit
def _add_columns(
    number, m, head, desc, buffers, ds, ds_tile, stage, k, n_heads, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BEFORE: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """Adds one column block of a step's dQ to the sum, in tiles of `ROWS` queries and at most 64 columns.

    BEFORE: how many columns of the head come before this block. IS_LAST: whether this is the head's last column block.
    dS is released after the last matmul of the last block.
    """
    BLOCK_M: gl.constexpr = ds.buffers.shape[2]
    COLUMNS: gl.constexpr = buffers.shape[-2] // 2  # columns in a tile of dQ
    ACROSS: gl.constexpr = k.shape[1] // COLUMNS
    PIECES: gl.constexpr = BLOCK_M // ROWS * ACROSS
    ROWS_EACH: gl.constexpr = 2 * HEAD_DIM  # the number of rows of 32 elements that hold dQ of `ROWS` queries
    no_dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout=accumulator_layout(COLUMNS))
    for piece in gl.static_range(PIECES):
        ds_rows = ds_tile.slice(piece // ACROSS * ROWS, ROWS, dim=1).permute((1, 0))
        k_columns = k.slice(piece % ACROSS * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(ds_rows, k_columns, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if piece == PIECES - 1 and IS_LAST:
            ds.release(stage)
        buffer = buffers
        if len(buffers.shape) == 3:
            buffer = buffers.index((PIECES * number + piece) % buffers.shape[0])
        tma.store_wait(TILES_IN_FLIGHT - 1)  # waits until TMA has read the previous dQ tile from this buffer
        buffer.store(in_order_of_threads(dq))
        fence_async_shared()
        unit = m // ROWS + piece // ACROSS
        row = (unit * n_heads + head) * ROWS_EACH + (2 * BEFORE + piece % ACROSS * 2 * COLUMNS)
        tma_reduce_add(desc, [row, 0], buffer)


@gluon.jit
def add_dq(
    sums, ds, k_bufs, kv_full, tile_order, ranges, queue, dq_order, GROUP: gl.constexpr, ALIGNMENT: gl.constexpr
):
    """Runs the dQ warpgroup over all items of the queue, or over the program's only item if there is no queue."""
    BLOCK_N: gl.constexpr = ds.buffers.shape[1]
    BLOCK_M: gl.constexpr = ds.buffers.shape[2]
    n_heads = tile_order.n_heads * GROUP
    if queue is None:
        item = locate_item(gl.program_id(0), tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _add_item(item, 0, 0, sums, ds, k_bufs, kv_full, n_heads, dq_order, GROUP)
    else:
        item_number, done = 0, 0
        fields = read(queue, item_number)
        while field(fields, 0) >= 0:
            item = posted_item(fields)
            done = _add_item(item, item_number, done, sums, ds, k_bufs, kv_full, n_heads, dq_order, GROUP)
            item_number += 1
            fields = read(queue, item_number)
    tma.store_wait(0)
