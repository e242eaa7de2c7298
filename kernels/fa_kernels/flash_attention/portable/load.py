"""Loading tiles of rows whose width need not be a power of two: a head of 96 is a part of 64 and a part of 32."""

import triton
import triton.language as tl


@triton.jit
def load_part(ptr, first, stride, total, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
              ROWS: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """[ROWS, SIZE]: columns FROM to FROM + SIZE of the rows from `first` on; zero past WIDTH and past row `total`.

    Rows past `total` are checked only under MASK_ROWS.
    """
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, SIZE)
    # int64 up to the tile: 1M tokens x 32 heads x 128 is past 2**31. Within it, int32 takes half the registers
    ptrs = (ptr + first * stride.to(tl.int64)) + (rows[:, None] * stride + cols[None, :])
    if MASK_ROWS and FROM + SIZE > WIDTH:
        tile = tl.load(ptrs, mask=(first + rows[:, None] < total) & (cols[None, :] < WIDTH), other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=first + rows[:, None] < total, other=0.0)
    elif FROM + SIZE > WIDTH:
        tile = tl.load(ptrs, mask=cols[None, :] < WIDTH, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_part(ptr, values, first, stride, total, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr):  # fmt: skip
    """Writes [ROWS, SIZE] where load_part would have read it."""
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, SIZE)
    ptrs = (ptr + first * stride.to(tl.int64)) + (rows[:, None] * stride + cols[None, :])
    mask = (first + rows[:, None] < total) & (cols[None, :] < WIDTH)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)
