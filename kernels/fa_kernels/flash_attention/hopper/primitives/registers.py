"""Functions that depend on how the elements of an accumulator are distributed over the registers of threads.

The accumulator of a warpgroup's matmul has 64 rows. Warp w holds rows 16 w to 16 w + 15. The figure shows which thread
of the warp holds each pair of adjacent columns. The other columns repeat the first eight columns:

    columns       0-1   2-3   4-5   6-7   8-9  10-11
    row 0, 8       t0    t1    t2    t3    t0    t1
    row 1, 9       t4    t5    t6    t7    t4    t5
    row 7, 15     t28   t29   t30   t31   t28   t29

A thread therefore holds N / 2 elements of an accumulator [64, N], in only two rows, i and i + 8. `PER_ROW` is the
layout of a tensor [64, 8] that stores one value for each row. Each of the eight columns of a row holds the row's value,
or the eight columns of a row add up to the row's value.

`in_order_of_threads` reorders an fp32 accumulator for stores to shared memory. In row order, a thread stores 8 bytes at
a time, and pairs of threads hit the same banks of shared memory. In thread order, a thread stores 16 bytes at a time,
and the stores need half as many cycles as in row order.

`keep_columns` represents the visible columns of a row as bits of a register. ptxas turns tests of single bits into the
instruction R2P, which moves seven bits to predicates at once. Comparing each element's column with the first and the
last visible column would need three times as many instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

PER_ROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


@gluon.constexpr_function
def accumulator_layout(n):
    """Returns the layout of a warpgroup's accumulator [64, n].

    The arguments of the layout are version 3 of the tensor cores (Hopper), 4 warps along the rows, and 16 x n elements
    per warp.
    """
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def operand_layout(n):
    """Returns the register layout of the first operand of a matmul whose accumulator is [64, n].

    A thread holds the same rows and columns as in `accumulator_layout`. An accumulator that is rounded to 16 bits, such
    as P, can therefore be an operand without moving data between threads.
    """
    return gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(n), k_width=2)


class _OneTuple:
    """Wraps a Triton code generator, so that `call_JitFunction` passes all `values` to `function` as one tuple.

    `constants` are further arguments of `function`.
    """

    def __init__(self, generator, constants):
        self.generator, self.constants = generator, constants

    def call_JitFunction(self, function, values, kwargs):
        return self.generator.call_JitFunction(function, [core.tuple(values), *self.constants], kwargs)


@core.builtin
def map_threads(function, tensors, constants, _semantic=None, _generator=None):
    """Calls `function` once per thread, and passes the thread's elements of all tensors in one tuple.

    `constants` are further arguments of `function`. `function` returns a tuple with the thread's elements of all result
    tensors. `function` must have no side effects. Warp votes and shuffles are allowed where all threads of a warp take
    the same path. Gluon's own map_elementwise (Triton 3.6 and 3.7) would pass each element as a separate argument.
    """
    pack = tensors[0].numel.value // 128
    generator = _OneTuple(_generator, [core.constexpr(x) for x in constants])
    return core.map_elementwise(function, *tensors, pack=pack, _semantic=_semantic, _generator=generator)


@gluon.jit
def along_rows(x, like):
    """Repeats x [64, 8] along the columns, to the shape and the layout of `like` [64, N].

    No data moves between threads.
    """
    for _ in gl.static_range(_doublings(like.shape[1])):
        x = gl.reshape(gl.permute(gl.join(x, x), [0, 2, 1]), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def first_columns(x):
    """Returns the first eight columns of x [64, N]. `first_columns` is the inverse of `along_rows`."""
    for _ in gl.static_range(_doublings(x.shape[1])):
        x = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))[0]
    return gl.convert_layout(x, PER_ROW, assert_trivial=True)


@gluon.jit
def in_order_of_threads(x):
    """Views an accumulator x [64, N] as [2 N, 32]. A row of the view holds four elements from each of eight threads.

    No data moves between threads. Element (r, c) of x has a flat index in the view. From the lowest to the highest, the
    bits of this flat index are c0, r3, c1, c2, r0, r1, r2, r4, r5, c3, c4 and so on. Here c0 is the lowest bit of the
    column index c, and r3 is bit 3 of the row index r.
    """
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [x.shape[3] * 16, 32])


@gluon.constexpr_function
def _doublings(n):
    return (n // 8).bit_length() - 1


@gluon.jit
def keep_columns(x, start, end, OTHERWISE: gl.constexpr):
    """Returns x [M, N]. Row i keeps the columns start[i] to end[i] - 1, and its other elements become `OTHERWISE`.

    x is fp32 in the layout of a warpgroup's accumulator. start and end have the layout of x's rows. N is at most 128.
    """
    n: gl.constexpr = x.shape[1] // 2  # a thread holds a quarter of the columns in each of two rows
    start, end = gl.expand_dims(start, 1), gl.expand_dims(end, 1)
    return gl.inline_asm_elementwise(_asm(n, OTHERWISE), _constraints(n), [x, start, end], gl.float32, True, n)


@gluon.constexpr_function
def _asm(n, otherwise):
    # A thread's n elements are two elements of row i, two of row i + 8, two of row i, and so on. Bit 2 * g + e of a
    # row's mask belongs to column 8 * g + 2 * (lane % 4) + e, where e is 0 or 1.
    lines = ["{", ".reg .b32 lane, a, b, c, m0, m1;", ".reg .pred p;"]
    lines += ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", "shl.b32 lane, lane, 1;"]
    for row in (0, 1):
        start, end = 2 * n + 2 * row, 3 * n + 2 * row
        lines += [*_below("c", start), *_below(f"m{row}", end), "not.b32 c, c;", f"and.b32 m{row}, m{row}, c;"]
    for i in range(n):
        bit = i // 4 * 2 + i % 2
        lines += [f"and.b32 a, m{i // 2 % 2}, {1 << bit};", "setp.ne.b32 p, a, 0;"]
        lines += [f"selp.f32 ${i}, ${n + i}, {otherwise}, p;"]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _below(mask, column):
    # Returns instructions that compute a mask in which the bits of all columns with an index less than `column` are
    # set. In each group of 8 columns, a thread has two columns, so a mask has two bits per group.
    return [
        f"sub.s32 a, ${column}, lane;",
        "max.s32 a, a, 0;",
        "and.b32 b, a, 7;",
        "min.u32 b, b, 2;",
        "shr.u32 a, a, 3;",
        "shl.b32 a, a, 1;",
        "add.s32 a, a, b;",
        "min.u32 a, a, 32;",  # a shift by 32 gives 0
        "mov.b32 b, 1;",
        "shl.b32 b, b, a;",
        f"sub.s32 {mask}, b, 1;",
    ]


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=&f"] * n + ["f"] * n + ["r"] * (2 * n))
