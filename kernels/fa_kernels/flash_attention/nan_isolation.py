"""NaN isolation: NaN in one document must not reach the results of other documents.

A kernel either isolates NaN while it computes (`isolate_nan`), or only marks rows whose results contain NaN.
If a kernel has marked rows, portable/repair.py computes the tiles of the marked rows again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div

# Each mark covers 64 rows of a head. A tile can have at most 128 rows, because `is_marked` reads only two marks: the
# mark of the tile's first row, and the mark of the tile's last row.
ROWS_PER_MARK = tl.constexpr(64)


@triton.jit
def isolate_nan(x):
    """Returns x [N, D] with 0 in place of inf and NaN, and a vector [N] that says which rows of x contained inf or NaN.

    An element of the vector is NaN if the row of x contains inf or NaN, and 0 otherwise.

    In the forward pass, x is a block of V, and the next matmul computes P V. P is 0 where a query does not see a key.
    Because 0 * NaN is NaN, NaN would reach other documents without `isolate_nan`. For each key that a query sees, the
    caller can add the key's element of the vector to P of the query and the key. If the caller adds the vector to P,
    the output o of a query is NaN whenever the query sees a key whose row of V contains inf or NaN. `isolate_nan`
    doubles the instructions of a masked loop, so kernels for one document are compiled without `isolate_nan`.
    """
    zeros = x * 0.0  # x * 0 is 0 where x is finite, and NaN where x is inf or NaN
    return tl.where(zeros == 0.0, x, 0.0), tl.sum(zeros.to(tl.float32), axis=1)


@triton.jit
def is_marked(marks_ptr, head, first, total, ROWS: tl.constexpr):
    """Returns whether a tile has a NaN mark. The tile is the `ROWS` rows of a head that begin at row `first`.

    If the arguments `head` and `first` are blocks [N], `is_marked` checks N tiles at once. marks_ptr points to the
    result of `new_marks`.
    """
    marks_ptr += head.to(tl.int64) * tl.cdiv(total, ROWS_PER_MARK)
    last = tl.minimum(first + ROWS, total) - 1
    return (tl.load(marks_ptr + first // ROWS_PER_MARK) | tl.load(marks_ptr + last // ROWS_PER_MARK)) != 0


@triton.jit
def any_is_marked(marks_ptr, item, n_items, n_tiles, total, ROWS: tl.constexpr, LOOK: tl.constexpr):
    """Returns whether any of the program's next `LOOK` work items has a NaN mark.

    Item i is tile `i % n_tiles` of head `i // n_tiles`. The program's next items are `item`, `item + num_programs`, and
    so on.
    """
    items = tl.minimum(item + tl.arange(0, LOOK) * tl.num_programs(0), n_items - 1)
    marked = is_marked(marks_ptr, items // n_tiles, items % n_tiles * ROWS, total, ROWS)
    return tl.sum(marked.to(tl.int32), axis=0) > 0


def new_marks(n_heads: int, total: int, device: torch.device) -> Tensor:
    """Returns uninitialised marks, (n_heads, ceil(total / 64)) int32.

    A kernel writes one mark for every 64 rows of a head. A mark is 1 if one of its 64 rows contains NaN or infinity,
    else 0.
    """
    return torch.empty(n_heads, ceil_div(total, ROWS_PER_MARK.value), dtype=torch.int32, device=device)
