"""Tuples of descriptors and buffers, one for each block of a head's columns.

Triton's blocks are powers of two, so a head of 96 columns is held as 64 and 32. Padded to 128 columns, each matmul
would cost a third more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma


@gluon.jit
def columns_of(first, rest):
    """One block of columns, or two where `rest` is not None."""
    columns = (first,)
    if rest is not None:
        columns += (rest,)
    return columns


@gluon.constexpr_function
def nbytes_of(descs):
    """Bytes that one load of all columns writes."""
    return sum(desc.block_type.nbytes for desc in descs)


@gluon.constexpr_function
def width_of(tiles):
    """The columns of all tiles."""
    return sum(tile.shape[-1] for tile in tiles)


@gluon.jit
def new_buffer(desc, PLACES: gl.constexpr):
    """Shared memory [PLACES, rows, columns] for what a descriptor loads or stores."""
    block: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [PLACES, block[0], block[1]], desc.layout)


@gluon.jit
def new_buffers(descs, PLACES: gl.constexpr):
    """`new_buffer` for each block of columns."""
    buffers = ()
    for i in gl.static_range(len(descs)):
        buffers += (new_buffer(descs[i], PLACES),)
    return buffers


@gluon.jit
def at(buffers, place):
    """Each buffer's tile at `place`."""
    tiles = ()
    for i in gl.static_range(len(buffers)):
        tiles += (buffers[i].index(place),)
    return tiles


@gluon.jit
def both_at(a, b, place):
    """Each tile of two operands at `place`: (tiles of a, tiles of b)."""
    a_tiles, b_tiles = (), ()
    for i in gl.static_range(len(a)):
        a_tiles += (a[i].index(place),)
        b_tiles += (b[i].index(place),)
    return a_tiles, b_tiles


@gluon.jit
def with_rest_at(tiles, buffers, place):
    """The tiles at `place`, where `tiles` are the first ones of them."""
    for i in gl.static_range(len(tiles), len(buffers)):
        tiles += (buffers[i].index(place),)
    return tiles


@gluon.jit
def rows_at(tiles, start, ROWS: gl.constexpr):
    """ROWS rows of each tile, from `start` on."""
    rows = ()
    for i in gl.static_range(len(tiles)):
        rows += (tiles[i].slice(start, ROWS, dim=0),)
    return rows


@gluon.jit
def start_load(descs, row, column, full, buffers, place):
    """Starts to load rows of a head to `place`. `full` must expect `nbytes_of(descs)`."""
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[i], [row, column], full, buffers[i].index(place))


@gluon.jit
def begin_scores(a, b, zeros):
    """Starts a b^T, summed over all columns. a [M, D]: in registers or shared memory; b [N, D]: shared memory."""
    scores = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        scores = warpgroup_mma(a[i], b[i].permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def begin_scores_at(a, first, buffers, place, zeros):
    """`begin_scores` with b at `place` of `buffers`. first: the tile of the first columns there.

    It locates the other tiles between the matmuls. The compiler keeps the order in which addresses are computed.
    """
    scores = warpgroup_mma(a[0], first.permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        scores = warpgroup_mma(a[i], buffers[i].index(place).permute((1, 0)), scores, is_async=True)
    return scores
