"""Masks as ranges: what a tile of rows sees, which blocks need a mask, and the mask of one block."""

import triton
import triton.language as tl


@triton.jit
def tile_range(start_ptr, end_ptr, first, last, BLOCK: tl.constexpr):
    """Returns start <= whole_start <= whole_end <= end of what the rows first to last see.

    Every row sees all BLOCK-sized blocks between whole_start and whole_end; the other blocks need a mask. Ranges never
    move backwards from row to row, so the first and the last row bound them all.
    """
    start, last_start = tl.load(start_ptr + first), tl.load(start_ptr + last)
    first_end, end = tl.load(end_ptr + first), tl.load(end_ptr + last)
    whole_start = tl.minimum(start + tl.cdiv(last_start - start, BLOCK) * BLOCK, end)
    whole_end = whole_start + tl.maximum(first_end - whole_start, 0) // BLOCK * BLOCK
    return start, whole_start, whole_end, end


@triton.jit
def is_visible(cols, row_start, row_end):
    """[rows, cols]: whether each column is in the range of each row."""
    return (cols[None, :] >= row_start[:, None]) & (cols[None, :] < row_end[:, None])
