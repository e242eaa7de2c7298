"""Tiles of a head in column blocks: a head of 96 columns is a block of 64 and a block of 32.

A width need not be a power of two, but a block must be one. COLUMNS is a tuple of the one or two widths that hold WIDTH
columns (columns_of_head.py). A tile of a head is a tuple of as many blocks. The compiler fetches and stores blocks in
the order in which the code names them, so kernels name a block of one tensor and then the same block of another.
"""

import triton
import triton.language as tl

from fa_kernels.flash_attention.nan_isolation import isolate_nan


@triton.jit
def load_columns(ptr, first, stride, total, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                 MASK_ROWS: tl.constexpr):  # fmt: skip
    """ROWS rows from `first` on, as a tuple of blocks [ROWS, COLUMNS[i]]. Arguments as for `load_block`."""
    blocks = ()
    for i in tl.static_range(len(COLUMNS)):
        blocks += (load_block(ptr, first, stride, total, i, COLUMNS, WIDTH, ROWS, MASK_ROWS),)
    return blocks


@triton.jit
def load_both(a_ptr, b_ptr, first, stride_a, stride_b, total, A_COLUMNS: tl.constexpr, A_WIDTH: tl.constexpr,
              B_COLUMNS: tl.constexpr, B_WIDTH: tl.constexpr, ROWS: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """load_columns of the same rows of two tensors, block by block."""
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
    """load_columns, given its first block."""
    blocks = (block,)
    for i in tl.static_range(1, len(COLUMNS)):
        blocks += (load_block(ptr, first, stride, total, i, COLUMNS, WIDTH, ROWS, MASK_ROWS),)
    return blocks


@triton.jit
def load_block(ptr, first, stride, total, INDEX: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS[INDEX]]: one column block of the rows from `first` on; zero past WIDTH and past row `total`.

    Rows past `total` are checked only under MASK_ROWS.
    """
    FROM: tl.constexpr = 0 if INDEX == 0 else COLUMNS[0]
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, COLUMNS[INDEX])
    # int64 up to the tile: 1M tokens x 32 heads x 128 is past 2**31. Within it, int32 takes half the registers
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
def in_fp16(columns):
    """The blocks, converted to fp16."""
    blocks = ()
    for i in tl.static_range(len(columns)):
        blocks += (columns[i].to(tl.float16),)
    return blocks


@triton.jit
def zero_columns(COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """A tuple of fp32 blocks [ROWS, COLUMNS[i]] of zeros."""
    blocks = ()
    for i in tl.static_range(len(COLUMNS)):
        blocks += (_zero_block(i, COLUMNS, ROWS),)
    return blocks


@triton.jit
def _zero_block(INDEX: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    SIZE: tl.constexpr = COLUMNS[INDEX]
    return tl.zeros([ROWS, SIZE], tl.float32)


@triton.jit
def dot_of_columns(a, b, PRECISION: tl.constexpr):
    """a @ b.T over all columns of a head: [M, D] and [N, D] in blocks -> [M, N] fp32."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_to_columns(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b: a [M, N]; acc [M, D] and b [N, D] in blocks."""
    blocks = ()
    for i in tl.static_range(len(acc)):
        blocks += (tl.dot(a, b[i], acc[i], input_precision=PRECISION),)
    return blocks


@triton.jit
def add_to_rescaled(acc, rescale, a, b, PRECISION: tl.constexpr):
    """acc * rescale + a @ b, like `add_to_columns`; rescale [M]."""
    blocks = ()
    for i in tl.static_range(len(acc)):
        blocks += (tl.dot(a, b[i], acc[i] * rescale[:, None], input_precision=PRECISION),)
    return blocks


@triton.jit
def isolate_nan_columns(blocks):
    """isolate_nan of a tuple of column blocks: the blocks without NaN, and the sum of their second results."""
    finite, nan_rows = isolate_nan(blocks[0])
    isolated = (finite,)
    for i in tl.static_range(1, len(blocks)):
        finite, more = isolate_nan(blocks[i])
        isolated += (finite,)
        nan_rows += more
    return isolated, nan_rows


@triton.jit
def by_block(a, b):
    """Two tuples of blocks, regrouped by column block: ((a[:1], b[:1]), (a[1:], b[1:]))."""
    return (a[:1], b[:1]), (a[1:], b[1:])


@triton.jit
def by_tensor(blocks):
    """The inverse of `by_block`: (a, b)."""
    return blocks[0][0] + blocks[1][0], blocks[0][1] + blocks[1][1]


@triton.jit
def store_block(ptr, block, first, stride, total, INDEX: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Writes [ROWS, COLUMNS[INDEX]] where load_block would have read it."""
    FROM: tl.constexpr = 0 if INDEX == 0 else COLUMNS[0]
    rows = tl.arange(0, ROWS)
    cols = FROM + tl.arange(0, COLUMNS[INDEX])
    ptrs = (ptr + first * stride.to(tl.int64)) + (rows[:, None] * stride + cols[None, :])
    mask = (first + rows[:, None] < total) & (cols[None, :] < WIDTH)
    tl.store(ptrs, block.to(ptr.dtype.element_ty), mask=mask)
