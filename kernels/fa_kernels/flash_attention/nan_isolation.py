"""Keeps NaN of one document out of the others.

A kernel either isolates NaN while it computes (`isolate_nan`), or marks rows that contain NaN. portable/repair.py then
computes the marked tiles again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div

ROWS_PER_MARK = tl.constexpr(64)  # at least half a tile of any kernel


@triton.jit
def isolate_nan(x):
    """Returns x [N, D] with 0 for each element that is not finite, and [N]: NaN for rows that had one, else 0.

    x holds rows that some rows of the program do not see. Their weight is 0, but 0 * NaN is NaN, which would leave its
    document through the matmul. Adding the second result to the weights of visible rows keeps NaN where it belongs.
    This doubles the instructions of a masked loop, so kernels for one document are compiled without it.
    """
    zeros = x * 0.0  # NaN where x is not finite
    return tl.where(zeros == 0.0, x, 0.0), tl.sum(zeros.to(tl.float32), axis=1)


@triton.jit
def is_marked(marks_ptr, head, first, total, ROWS: tl.constexpr):
    """Whether the ROWS rows of a head from `first` on are marked.

    marks_ptr points to the marks of `new_marks`. head and first may be tensors, for many tiles.
    """
    marks_ptr += head.to(tl.int64) * tl.cdiv(total, ROWS_PER_MARK)
    last = tl.minimum(first + ROWS, total) - 1
    return (tl.load(marks_ptr + first // ROWS_PER_MARK) | tl.load(marks_ptr + last // ROWS_PER_MARK)) != 0


@triton.jit
def any_is_marked(marks_ptr, item, n_items, n_tiles, total, ROWS: tl.constexpr, LOOK: tl.constexpr):
    """Whether one of the program's next LOOK items, from `item` on, is marked. Item i is tile i % n_tiles of a head."""
    items = tl.minimum(item + tl.arange(0, LOOK) * tl.num_programs(0), n_items - 1)
    marked = is_marked(marks_ptr, items // n_tiles, items % n_tiles * ROWS, total, ROWS)
    return tl.sum(marked.to(tl.int32), axis=0) > 0


def new_marks(n_heads: int, total: int, device: torch.device) -> Tensor:
    """(n_heads, ceil(total / 64)) int32, not set yet. A kernel writes 1 if one of 64 rows of a head has NaN, else 0."""
    return torch.empty(n_heads, ceil_div(total, ROWS_PER_MARK.value), dtype=torch.int32, device=device)
