"""How programs of a grid find their tile and head, so that the longest start first and K and V stay in L2."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.flash_attention.tiles import interpreted

SPOILED_ROWS = tl.constexpr(64)  # at least half a tile of any kernel here
L2_BUDGET = 32 * 2**20  # bytes of K and V that heads worked at one time may span; an H200 has 50 MB of L2


@triton.jit
def tile_and_head(program, tiles_ptr, n_tiles, n_heads, section, PARTS: tl.constexpr):
    """Heads are taken in sections; within one, tiles in the schedule's order, and for each tile all heads together.

    PARTS is the number of the kernel's tiles in one of the schedule's. Without tiles_ptr the first tile comes first.
    """
    section_index = program // (n_tiles * section)
    within = program % (n_tiles * section)
    heads_here = tl.minimum(section, n_heads - section_index * section)
    item = within // heads_here
    head = section_index * section + within % heads_here
    if tiles_ptr is None:
        tile = item
    else:
        tile = tl.load(tiles_ptr + item // PARTS) * PARTS + (PARTS - 1 - item % PARTS)
    return tile, head


@triton.jit
def is_spoiled(spoiled_ptr, head, first, total, ROWS: tl.constexpr):
    """Whether other kernels, which do not contain NaN, left NaN in the ROWS rows of a head from `first` on.

    spoiled is as `new_marks` makes it; head and first may be of many tiles.
    """
    spoiled_ptr += head.to(tl.int64) * tl.cdiv(total, SPOILED_ROWS)
    last = tl.minimum(first + ROWS, total) - 1
    return (tl.load(spoiled_ptr + first // SPOILED_ROWS) | tl.load(spoiled_ptr + last // SPOILED_ROWS)) != 0


@triton.jit
def any_is_spoiled(spoiled_ptr, item, n_items, n_tiles, total, ROWS: tl.constexpr, LOOK: tl.constexpr):
    """Whether one of this program's next LOOK items, from `item` on, is; item i is tile i % n_tiles of a head."""
    items = tl.minimum(item + tl.arange(0, LOOK) * tl.num_programs(0), n_items - 1)
    marked = is_spoiled(spoiled_ptr, items // n_tiles, items % n_tiles * ROWS, total, ROWS)
    return tl.sum(marked.to(tl.int32), axis=0) > 0


def new_marks(n_heads: int, total: int, device: torch.device) -> Tensor:
    """(n_heads, ceil(total / 64)) int32, to be set: 1 where one of 64 rows of a head has NaN in some column, else 0."""
    return torch.empty(n_heads, ceil_div(total, SPOILED_ROWS.value), dtype=torch.int32, device=device)


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv is a constexpr function, which takes the host 2 us."""
    return -(-a // b)


def repair_grid(device: torch.device, n_items: int) -> tuple[int, int]:
    """Programs that repair n_items tiles, one a multiprocessor, and at how many marks each of them looks at a time.

    Marks are rare: what counts is that a launch that finds none is short.
    """
    if interpreted():
        return min(n_items, 3), 4  # few, so that short inputs have more tiles than that
    return min(n_items, multiprocessors(device)), 256


@cache  # each call asks, up to three times
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def grid_of_tiles(work_tiles: Tensor, n_heads: int, block: int) -> tuple[int, int]:
    """The number of programs, and of blocks of `block` tokens for each head; some of the last may be out of range."""
    n_tiles = work_tiles.numel() * (WORK_TILE // block)
    return n_tiles * n_heads, n_tiles


def heads_per_section(k: Tensor, v: Tensor, n_heads: int) -> int:
    """How many query heads to work at once so that the K and V they read fit in L2; whole groups of a GQA."""
    total, n_kv_heads, head_dim = k.shape
    bytes_per_kv_head = max(1, total * (head_dim + v.shape[-1]) * k.element_size())
    kv_heads = min(n_kv_heads, max(1, L2_BUDGET // bytes_per_kv_head))
    return kv_heads * (n_heads // n_kv_heads)


def precision_of(x: Tensor) -> str:
    """tl.dot's input_precision: how products of x's dtype are made; of 2-byte inputs it says nothing.

    In fp32 by three TF32 products of the inputs' upper and lower halves, as torch's own attention has them: three times
    as fast as FMA instructions, which "ieee" means, and as accurate (scripts/results/fp32_tiles_h200_202611.md). Where
    the user allowed tf32 for torch's own products, by one. Infinities and NaN pass as they do through FMA, for Triton
    takes 0 for the products with a lower half where their sum is NaN; but what rounds to infinity, a part in 4096 below
    the largest fp32 number, counts as infinite.
    """
    if x.dtype != torch.float32 or (x.is_cuda and not _has_tf32(x.device)):
        return "ieee"
    # allow_tf32, the older name, may not be read where fp32_precision was set; this one knows of both
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@cache  # each launch asks
def _has_tf32(device: torch.device) -> bool:
    """Whether a CUDA device's tensor cores multiply TF32: from Ampere on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
