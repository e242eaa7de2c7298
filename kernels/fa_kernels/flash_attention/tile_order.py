"""Maps programs to tiles and heads, so that the tiles with the most work start first, and K and V stay in L2.

The heads are divided into groups, called sections. All tiles of one section run before the tiles of the next section,
so that the data in use fits in L2.
"""

import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div
from fa_kernels.flash_attention.schedule import WORK_TILE

KEYS_IN_L2 = 32 * 2**20  # maximum bytes of K and V in a section of heads; an H200 has 50 MB of L2
QUERIES_IN_L2 = 16 * 2**20  # maximum bytes of Q, dO and fp32 dQ in a section of heads; other values were slower on H200


@triton.jit
def tile_and_head(program, tiles_ptr, n_tiles, n_heads, section, TILES_PER_WORK_TILE: tl.constexpr):
    """Returns the tile and the head that a program processes.

    Consecutive programs process one tile for all heads of a section, then the next tile for the same heads, and so on.
    After the last tile, the programs continue with the next section of heads. The argument `section` is the number of
    heads per section. With 2 tiles, 4 heads and section=2, programs 0 to 7 process these pairs (tile, head) if tiles
    are in ascending order: (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3).
    tiles_ptr holds the schedule's order of tiles; if it is None, tiles are processed in ascending order. The kernel
    divides each tile of the schedule into `TILES_PER_WORK_TILE` smaller tiles, and processes the last smaller tile
    first.
    """
    section_index = program // (n_tiles * section)
    within = program % (n_tiles * section)
    heads_here = tl.minimum(section, n_heads - section_index * section)
    item = within // heads_here
    head = section_index * section + within % heads_here
    if tiles_ptr is None:
        tile = item
    else:
        tile = tl.load(tiles_ptr + item // TILES_PER_WORK_TILE) * TILES_PER_WORK_TILE + (
            TILES_PER_WORK_TILE - 1 - item % TILES_PER_WORK_TILE
        )
    return tile, head


def grid_of_tiles(work_tiles: Tensor, n_heads: int, block: int) -> tuple[int, int]:
    """Returns the number of programs, and how many tiles a head has. A tile holds `block` tokens.

    The last tiles may begin after the last token.
    """
    n_tiles = work_tiles.numel() * (WORK_TILE // block)
    return n_tiles * n_heads, n_tiles


def heads_per_section(k: Tensor, v: Tensor, n_heads: int) -> int:
    """Returns the number of query heads in a section. A section holds whole GQA groups.

    K and V of a section fit in L2, unless one KV head is already too large.
    """
    total, n_kv_heads, head_dim = k.shape
    bytes_per_kv_head = max(1, total * (head_dim + v.shape[-1]) * k.element_size())
    kv_heads = min(n_kv_heads, max(1, KEYS_IN_L2 // bytes_per_kv_head))
    return kv_heads * (n_heads // n_kv_heads)


def kv_heads_per_section(q: Tensor, n_kv_heads: int, n_tiles: int, programs: int, fewest: int = 1) -> int:
    """Returns the number of KV heads in a section. If possible, Q, dO and dQ of a section fit in L2.

    A section is a group of heads that are processed together. A section has at least `fewest` KV heads, and at least
    about two tiles per program, unless there are too few KV heads. If the last section had fewer than two tiles per
    program, its longest tiles would start late. Most multiprocessors would be idle while the longest tiles of the last
    section run. `programs` is the number of programs that run at the same time. n_tiles is the number of tiles per KV
    head.
    """
    total, n_heads, head_dim = q.shape
    bytes_per_kv_head = total * head_dim * (2 * q.element_size() + 4) * (n_heads // n_kv_heads)
    fit = max(1, QUERIES_IN_L2 // bytes_per_kv_head)
    fewest = max(fewest, 2 * programs // max(1, n_tiles))
    if fit >= fewest:
        return min(fit, n_kv_heads)
    return ceil_div(n_kv_heads, max(1, n_kv_heads // fewest))  # sections of similar size


def fewest_kv_heads(total_k: int, total_q: int, crosses_documents: bool) -> int:
    """Returns the minimum number of KV heads in a section, a group of heads that the fused backward processes together.

    Callers pass the result to kv_heads_per_section as the argument `fewest`.

    With one KV head at a time, all running tiles of a document compete for the same rows of dQ. Packed documents are
    faster with sections of at least two KV heads (scripts/results/key_order_h100_202611.md). In context parallelism,
    each GPU processes a part of a long document. For a part of a document, sections of two KV heads were up to 25%
    slower than sections of one KV head (scripts/results/context_shares_h100_202611.md). A likely reason is that most
    tiles of keys use the same queries, and that Q, dO and dQ of two KV heads do not fit in L2.
    """
    is_part_of_document = 2 * total_k >= 3 * total_q
    return 2 if crosses_documents and not is_part_of_document else 1
