"""Splits the columns of a head into one or two blocks, because Triton needs blocks whose width is a power of two."""

import triton


def split_columns(width: int, itemsize: int = 2) -> tuple[int, int]:
    """Returns the widths of one or two blocks that hold `width` columns with the least padding.

    If one block is enough, the second width is 0. A block has at least 16 columns, or 32 in fp8 (itemsize 1), because
    tl.dot accepts no fewer.

    Examples:

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
    """Returns the width of each column block of a head: the widths from `split_columns` that are not 0."""
    return tuple(block for block in split_columns(width, itemsize) if block)
