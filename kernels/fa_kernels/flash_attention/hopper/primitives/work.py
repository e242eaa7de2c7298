"""Structures that describe a kernel's work: the order of tiles, the ranges that rows see, and scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.flash_attention.structure import structure
from fa_kernels.flash_attention.tile_order import tile_and_head


@structure
class TileOrder:
    """The order in which programs process tiles and heads.

    If `tiles` is None, tiles are processed in ascending order.
    """

    tiles: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    section: gl.tensor  # how many heads are processed at the same time (tile_order.py)

    @gluon.jit
    def locate(self, item_index, TILES_PER_WORK_TILE: gl.constexpr = 1):
        """Returns the tile and the head of a work item."""
        return tile_and_head(item_index, self.tiles, self.n_tiles, self.n_heads, self.section, TILES_PER_WORK_TILE)


@structure
class Ranges:
    """Pointers to the start and the end (exclusive) of the range that each of `total` tokens sees.

    The range of a query contains keys, and the range of a key contains queries. start and end never decrease from one
    token to the next.
    """

    start: gl.tensor
    end: gl.tensor
    total: gl.tensor


@structure
class Scale:
    """The softmax scale, and the bound of the soft cap."""

    softmax: gl.tensor
    softcap: gl.tensor
