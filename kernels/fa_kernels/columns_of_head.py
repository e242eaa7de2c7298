"""Splits the columns of a head into one or two blocks, because a block's width must be a power of two."""

import triton


def split_columns(width: int, itemsize: int = 2) -> tuple[int, int]:
    """Returns the widths of the two blocks that hold `width` columns with the least padding. The second may be 0.

    The widths are powers of two. The minimum is 16 columns, or 32 in fp8 (itemsize 1): tl.dot accepts no fewer.

    >>> [split_columns(d) for d in (8, 64, 80, 96, 104, 192)]
    [(16, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64)]
    >>> [split_columns(d, itemsize=1) for d in (8, 40, 80)]
    [(32, 0), (64, 0), (64, 32)]
    """
    least = 32 if itemsize == 1 else 16
    first = max(least, 1 << (width.bit_length() - 1))
    rest = width - first
    if rest <= 0:
        return first, 0
    second = max(least, triton.next_power_of_2(rest))
    return (2 * first, 0) if second >= first else (first, second)


def columns_of(width: int, itemsize: int = 2) -> tuple[int, ...]:
    """Returns the widths of a head's one or two column blocks: `split_columns` without zeros."""
    return tuple(block for block in split_columns(width, itemsize) if block)
