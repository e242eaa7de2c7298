"""How programs of a grid find their tile and head, so that the longest start first and K and V stay in L2."""

import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div
from fa_kernels.flash_attention.schedule import WORK_TILE

KEYS_IN_L2 = 32 * 2**20  # bytes of K and V that heads worked at one time may span; an H200 has 50 MB of L2
# bytes of Q, dO and fp32 dQ that heads worked at one time may span: of 16, 32, 64 MiB and no bound the fastest on an
# H200 (568, 502, 538, 528 TFLOP/s at 16k, d=128). At d=256, 16k, 8 heads, no bound was found better: by the time that
# dK and dV took of the whole's FLOPs, 817 and 933 TFLOP/s in two runs of one head at a time, 873 of two, 819 of all
QUERIES_IN_L2 = 16 * 2**20


@triton.jit
def tile_and_head(program, tiles_ptr, n_tiles, n_heads, section, TILES_PER_WORK_TILE: tl.constexpr):
    """Heads are taken in sections; within one, tiles in the schedule's order, and for each tile all heads together.

    TILES_PER_WORK_TILE: how many of the kernel's tiles one tile of the schedule holds. Without tiles_ptr, tiles ascend.
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
    """The number of programs, and of blocks of `block` tokens for each head; some of the last may be out of range."""
    n_tiles = work_tiles.numel() * (WORK_TILE // block)
    return n_tiles * n_heads, n_tiles


def heads_per_section(k: Tensor, v: Tensor, n_heads: int) -> int:
    """How many query heads to work at once so that the K and V they read fit in L2; whole groups of a GQA."""
    total, n_kv_heads, head_dim = k.shape
    bytes_per_kv_head = max(1, total * (head_dim + v.shape[-1]) * k.element_size())
    kv_heads = min(n_kv_heads, max(1, KEYS_IN_L2 // bytes_per_kv_head))
    return kv_heads * (n_heads // n_kv_heads)


def kv_heads_per_section(q: Tensor, n_kv_heads: int, n_tiles: int, programs: int) -> int:
    """How many KV heads to work at once so that Q, dO and dQ of their query heads fit in L2.

    But so many that there are two tiles, of the n_tiles of each head, for each of the `programs` that run at one time:
    with fewer the longest tiles of the last section begin late, and most programs wait for them in the end. With four
    heads a KV head one fits from 8k tokens on; of 8 KV heads four at once take 2.16 ms for 2.65 (head_dim 128, 8k). All
    at once would take up to 29% of the speed of several short documents, which L2 then does not hold (run 37 of
    scripts/results/hopper_kernels_h200_202611.md).
    """
    total, n_heads, head_dim = q.shape
    bytes_per_kv_head = total * head_dim * (2 * q.element_size() + 4) * (n_heads // n_kv_heads)
    fit, fewest = max(1, QUERIES_IN_L2 // bytes_per_kv_head), 2 * programs // max(1, n_tiles)
    if fit >= fewest:
        return min(fit, n_kv_heads)
    return ceil_div(n_kv_heads, max(1, n_kv_heads // fewest))  # or a few more, so that no section is much smaller
