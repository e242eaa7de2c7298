"""Tiles of a head as column blocks: a head of 96 columns has a block of 64 and a block of 32.

The width of a Triton block must be a power of two, but a head may have any width. The columns of a head are divided
into one or two blocks. `WIDTH` is the number of columns of a head. The tuple `COLUMNS` holds the width of each block
(see columns_of_head.py). A tile is a tuple of blocks, one for each width in `COLUMNS`. Kernels that read two tensors
load block 0 of both tensors, then block 1 of both tensors. The compiler keeps the order of the loads.
"""

import triton
import triton.language as tl

from fa_kernels.flash_attention.nan_isolation import isolate_nan


@triton.jit
def load_block(ptr, first, stride, total, INDEX: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """Loads one column block [ROWS, COLUMNS[INDEX]], starting with row `first`.

    The tensor has `total` rows and `WIDTH` columns. Columns outside of the tensor are 0. With `MASK_ROWS`, rows outside
    of the tensor are also 0. Without `MASK_ROWS`, all rows must exist.
    """
    FROM: tl.constexpr = 0 if INDEX == 0 else COLUMNS[0]
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, COLUMNS[INDEX])
    # The offset of the tile is int64, because 1M tokens x 32 heads x 128 elements exceed 2**31. Offsets inside the tile
    # are int32, because int32 offsets need half as many registers.
    ptrs = (ptr + first * stride.to(tl.int64)) + (rows[:, None] * stride + cols[None, :])
    if MASK_ROWS and FROM + COLUMNS[INDEX] > WIDTH:
        block = tl.load(ptrs, mask=(first + rows[:, None] < total) & (cols[None, :] < WIDTH), other=0.0)
    elif MASK_ROWS:
        block = tl.load(ptrs, mask=first + rows[:, None] < total, other=0.0)
    elif FROM + COLUMNS[INDEX] > WIDTH:
        block = tl.load(ptrs, mask=cols[None, :] < WIDTH, other=0.0)
    else:
        block = tl.load(ptrs)
    return block


@triton.jit
def store_block(ptr, block, first, stride, total, INDEX: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Stores a block [ROWS, COLUMNS[INDEX]] to the addresses that `load_block` reads with the same arguments."""
    FROM: tl.constexpr = 0 if INDEX == 0 else COLUMNS[0]
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, COLUMNS[INDEX])
    ptrs = (ptr + first * stride.to(tl.int64)) + (rows[:, None] * stride + cols[None, :])
    mask = (first + rows[:, None] < total) & (cols[None, :] < WIDTH)
    tl.store(ptrs, block.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(ptr, first, stride, total, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                 MASK_ROWS: tl.constexpr):  # fmt: skip
    """Loads `ROWS` rows, starting with row `first`. Returns a tuple of blocks [ROWS, COLUMNS[i]].

    `load_block` explains the arguments.
    """
    blocks = ()
    for i in tl.static_range(len(COLUMNS)):
        blocks += (load_block(ptr, first, stride, total, i, COLUMNS, WIDTH, ROWS, MASK_ROWS),)
    return blocks


@triton.jit
def load_both(a_ptr, b_ptr, first, stride_a, stride_b, total, A_COLUMNS: tl.constexpr, A_WIDTH: tl.constexpr,
              B_COLUMNS: tl.constexpr, B_WIDTH: tl.constexpr, ROWS: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """Loads the same rows of two tensors: block 0 of each tensor, then block 1 of each tensor. See `load_columns`."""
    a = ()
    b = ()
    for i in tl.static_range(2):
        if i < len(A_COLUMNS):
            a += (load_block(a_ptr, first, stride_a, total, i, A_COLUMNS, A_WIDTH, ROWS, MASK_ROWS),)
        if i < len(B_COLUMNS):
            b += (load_block(b_ptr, first, stride_b, total, i, B_COLUMNS, B_WIDTH, ROWS, MASK_ROWS),)
    return a, b


@triton.jit
def with_rest(block, ptr, first, stride, total, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              MASK_ROWS: tl.constexpr):  # fmt: skip
    """Returns a tile as a tuple of blocks. `block` is the tile's first block; this function loads the other blocks."""
    blocks = (block,)
    for i in tl.static_range(1, len(COLUMNS)):
        blocks += (load_block(ptr, first, stride, total, i, COLUMNS, WIDTH, ROWS, MASK_ROWS),)
    return blocks


@triton.jit
def in_fp16(columns):
    """Converts each column block to fp16."""
    blocks = ()
    for i in tl.static_range(len(columns)):
        blocks += (columns[i].to(tl.float16),)
    return blocks


@triton.jit
def _zero_block(INDEX: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    SIZE: tl.constexpr = COLUMNS[INDEX]
    return tl.zeros([ROWS, SIZE], tl.float32)


@triton.jit
def zero_columns(COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tuple of fp32 blocks [ROWS, COLUMNS[i]] of zeros."""
    blocks = ()
    for i in tl.static_range(len(COLUMNS)):
        blocks += (_zero_block(i, COLUMNS, ROWS),)
    return blocks


@triton.jit
def dot_of_columns(a, b, PRECISION: tl.constexpr):
    """Computes a @ b.T. Shapes: a [M, D] and b [N, D], both as tuples of column blocks -> [M, N] fp32."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_to_columns(acc, a, b, PRECISION: tl.constexpr):
    """Computes acc + a @ b. Shapes: a [M, N]; acc [M, D] and b [N, D], both as tuples of column blocks -> like acc."""
    blocks = ()
    for i in tl.static_range(len(acc)):
        blocks += (tl.dot(a, b[i], acc[i], input_precision=PRECISION),)
    return blocks


@triton.jit
def add_to_rescaled(acc, rescale, a, b, PRECISION: tl.constexpr):
    """Computes acc * rescale + a @ b. Shapes: rescale [M]; the others as in `add_to_columns`."""
    blocks = ()
    for i in tl.static_range(len(acc)):
        blocks += (tl.dot(a, b[i], acc[i] * rescale[:, None], input_precision=PRECISION),)
    return blocks


@triton.jit
def isolate_nan_columns(blocks):
    """Applies isolate_nan to each column block.

    Returns (isolated, nan_rows). isolated: the blocks with 0 in place of inf and NaN. nan_rows: a vector that is NaN
    for each row that contains inf or NaN in any block, and 0 for all other rows.
    """
    finite, nan_rows = isolate_nan(blocks[0])
    isolated = (finite,)
    for i in tl.static_range(1, len(blocks)):
        finite, more = isolate_nan(blocks[i])
        isolated += (finite,)
        nan_rows += more
    return isolated, nan_rows


@triton.jit
def by_block(a, b):
    """Returns the first blocks of a and b, then their other blocks: ((a[:1], b[:1]), (a[1:], b[1:])).

    `dkdv_tile` carries its sums dK and dV through a loop in this order, because the compiled code depends on the order.
    """
    return (a[:1], b[:1]), (a[1:], b[1:])


@triton.jit
def by_tensor(blocks):
    """Undoes `by_block`: returns the two tuples (a, b) again."""
    return blocks[0][0] + blocks[1][0], blocks[0][1] + blocks[1][1]
