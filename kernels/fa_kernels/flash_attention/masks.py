"""Masks from ranges: which columns a tile of rows sees, which blocks need a mask, and the mask of one block."""

import triton
import triton.language as tl


@triton.jit
def tile_range(start_ptr, end_ptr, first, last, BLOCK: tl.constexpr):
    """Returns the column bounds start <= whole_start <= whole_end <= end for the rows from `first` to `last`.

    The rows see only columns from start to end - 1. Every row sees every column from whole_start to whole_end - 1.
    whole_end - whole_start is a multiple of `BLOCK`. Blocks between whole_start and whole_end need no mask. The start
    and the end of a row's range never decrease from one row to the next, so the ranges of the rows `first` and `last`
    determine the result. For example, with BLOCK = 2 (x: the row sees the column):

        column      0 1 2 3 4 5 6 7 8 9
        first row     x x x x x x
        next row        x x x x x x
        last row          x x x x x x       start = 1, whole_start = 3, whole_end = 7, end = 9
    """
    start, last_start = tl.load(start_ptr + first), tl.load(start_ptr + last)
    first_end, end = tl.load(end_ptr + first), tl.load(end_ptr + last)
    whole_start = tl.minimum(start + tl.cdiv(last_start - start, BLOCK) * BLOCK, end)
    whole_end = whole_start + tl.maximum(first_end - whole_start, 0) // BLOCK * BLOCK
    return start, whole_start, whole_end, end


@triton.jit
def is_visible(cols, row_start, row_end):
    """Returns the mask of a block, [rows, cols]: whether each row sees each column."""
    return (cols[None, :] >= row_start[:, None]) & (cols[None, :] < row_end[:, None])
