"""What a kernel is told of its work: which tile a program takes, and which rows of the other side a row sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.flash_attention.hopper.primitives.structure import structure
from fa_kernels.flash_attention.tile_order import tile_and_head


@structure
class TileOrder:
    """The order in which programs take tiles and heads. Without `tiles`, tiles come in the order of the stream."""

    tiles: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    section: gl.tensor  # heads that are worked at the same time

    @gluon.jit
    def locate(self, item_index, TILES_PER_WORK_TILE: gl.constexpr = 1):
        """The tile and the head of an item."""
        return tile_and_head(item_index, self.tiles, self.n_tiles, self.n_heads, self.section, TILES_PER_WORK_TILE)


@structure
class Ranges:
    """Pointers to the rows of the other side that each of `total` rows sees: start <= row < end. Both only ascend."""

    start: gl.tensor
    end: gl.tensor
    total: gl.tensor


@structure
class Scale:
    """What scores are multiplied with, and the bound of the soft cap."""

    softmax: gl.tensor
    softcap: gl.tensor
