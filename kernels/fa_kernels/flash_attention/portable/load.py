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


def split_width(width: int, itemsize: int = 2) -> tuple[int, int]:
    """The two powers of two, the second perhaps 0, that hold `width` columns with the least padding.

    Each part has at least 16 columns, or 32 in fp8 (itemsize 1), because tl.dot takes no fewer.

    >>> [split_width(d) for d in (8, 64, 80, 96, 104, 192)]
    [(16, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64)]
    >>> [split_width(d, itemsize=1) for d in (8, 40, 80)]
    [(32, 0), (64, 0), (64, 32)]
    """
    least = 32 if itemsize == 1 else 16
    first = max(least, 1 << (width.bit_length() - 1))
    rest = width - first
    if rest <= 0:
        return first, 0
    second = max(least, triton.next_power_of_2(rest))
    return (2 * first, 0) if second >= first else (first, second)
