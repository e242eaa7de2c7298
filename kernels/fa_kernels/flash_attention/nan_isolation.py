"""NaN of one document stays out of the others: kernels contain it, or mark the tiles to compute again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div

ROWS_PER_MARK = tl.constexpr(64)  # at least half a tile of any kernel here


@triton.jit
def isolate_nan(x):
    """Rows [N, D] that not every row of the program sees -> the same with 0 for what is not finite, and [N] 0 or NaN.

    An invisible row has a weight of 0, but 0 times NaN is NaN: it would leave its document through the product. The
    second result, added to the weights of the visible, keeps NaN where it belongs. Of one document nobody asks for
    that, and kernels compile without: it doubles a masked loop's instructions.
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
