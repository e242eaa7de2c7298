"""Structures that describe a kernel's work: the order of tiles, the visible ranges of tokens, and scales."""

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
    section: gl.tensor  # the number of heads in a section (tile_order.py)

    @gluon.jit
    def locate(self, index, TILES_PER_WORK_TILE: gl.constexpr = 1):
        """Returns the tile and the head of a work item."""
        return tile_and_head(index, self.tiles, self.n_tiles, self.n_heads, self.section, TILES_PER_WORK_TILE)


@structure
class Ranges:
    """Pointers to the start and the end (exclusive) of the visible range of each of `total` tokens.

    The range of a query consists of the keys that the query sees. The range of a key consists of the queries that see
    the key. The start and the end of a range never decrease from one token to the next.
    """

    start: gl.tensor
    end: gl.tensor
    total: gl.tensor


@structure
class Scale:
    """The factor of the attention scores (softmax_scale), and the bound of the soft cap."""

    softmax: gl.tensor
    softcap: gl.tensor
