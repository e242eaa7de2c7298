"""Helpers for tuples of descriptors, buffers or tiles that have one entry per column block of a head.

The width of a Triton block is a power of two, so a head of 96 columns is split into blocks of 64 and 32. If heads
of 96 columns were padded to 128 columns, each matmul would be a third more expensive.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from fa_kernels.flash_attention.hopper.primitives import tma


@gluon.jit
def column_blocks(first, rest):
    """Returns the tuple (first, rest), or the tuple (first,) if `rest` is None."""
    columns = (first,)
    if rest is not None:
        columns += (rest,)
    return columns


@gluon.constexpr_function
def nbytes_of(descs):
    """Returns the sum of the descriptors' block sizes, in bytes."""
    return sum(desc.block_type.nbytes for desc in descs)


@gluon.constexpr_function
def width_of(tiles):
    """Returns the total number of columns of the tiles."""
    return sum(tile.shape[-1] for tile in tiles)


@gluon.jit
def new_buffer(desc, PLACES: gl.constexpr):
    """Allocates shared memory [PLACES, rows, columns] for the blocks that a descriptor loads or stores."""
    block: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [PLACES, block[0], block[1]], desc.layout)


@gluon.jit
def new_buffers(descs, PLACES: gl.constexpr):
    """Calls `new_buffer` for each column block, and returns a tuple of the buffers."""
    buffers = ()
    for i in gl.static_range(len(descs)):
        buffers += (new_buffer(descs[i], PLACES),)
    return buffers


@gluon.jit
def at(buffers, place):
    """Returns a tuple that has the tile with index `place` of each buffer."""
    tiles = ()
    for i in gl.static_range(len(buffers)):
        tiles += (buffers[i].index(place),)
    return tiles


@gluon.jit
def both_at(a, b, place):
    """Returns the tiles of a and of b at index `place`. Addresses are computed in the order a[0], b[0], a[1], b[1]."""
    a_tiles, b_tiles = (), ()
    for i in gl.static_range(len(a)):
        a_tiles += (a[i].index(place),)
        b_tiles += (b[i].index(place),)
    return a_tiles, b_tiles


@gluon.jit
def with_rest_at(tiles, buffers, place):
    """Returns a tuple that has the tile with index `place` of each buffer.

    The argument `tiles` contains the tiles of the first len(tiles) buffers. The function appends the tiles of the
    remaining buffers.
    """
    for i in gl.static_range(len(tiles), len(buffers)):
        tiles += (buffers[i].index(place),)
    return tiles


@gluon.jit
def rows_at(tiles, start, ROWS: gl.constexpr):
    """Returns `ROWS` rows of each tile, beginning with row `start`."""
    rows = ()
    for i in gl.static_range(len(tiles)):
        rows += (tiles[i].slice(start, ROWS, dim=0),)
    return rows


@gluon.jit
def start_load(descs, row, column, full, buffers, place):
    """Starts TMA loads into index `place` of each buffer.

    The caller must first call mbarrier.expect for `full`, with at least `nbytes_of(descs)` bytes.
    """
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[i], [row, column], full, buffers[i].index(place))


@gluon.jit
def begin_scores(a, b, zeros):
    """Starts the matmul a b^T, summed over all column blocks.

    Shapes: a [M, D] in registers or shared memory, b [N, D] in shared memory -> [M, N].
    """
    scores = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        scores = warpgroup_mma(a[i], b[i].permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def begin_scores_at(a, first, buffers, place, zeros):
    """Starts the same matmuls as `begin_scores`. b is the tuple `at(buffers, place)`.

    `first` is the first tile of b. The addresses of the other tiles of b are computed between the matmuls, and the
    compiler keeps this order.
    """
    scores = warpgroup_mma(a[0], first.permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        scores = warpgroup_mma(a[i], buffers[i].index(place).permute((1, 0)), scores, is_async=True)
    return scores
