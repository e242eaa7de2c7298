"""Functions of all values of an accumulator that a thread holds, and numbers that it keeps of each of its rows.

Of a warpgroup's accumulator [64, N] a thread holds N / 2 values: of row i and of row i + 8 in turns a pair of adjacent
columns, the next pair eight columns on. PER_ROW [64, 8] is such an accumulator too, of which it holds four values. A
number of each row fills it, twice in each of four threads, or is the sum of all eight columns.

Rows of fp32 are written to shared memory 8 bytes at a time, by threads of which two and two use the same banks. Where
it does not matter how an accumulator lies there, `in_order_of_threads` takes half the cycles: 16 bytes of a thread side
by side.

`keep_columns` masks by one bit for each column, which takes a third of the instructions of two comparisons each: ptxas
turns tests of single bits into R2P, which moves seven bits into predicates at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

PER_ROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


class _OneTuple:
    """A code generator that calls a function with one tuple, and constants, for the arguments it is given."""

    def __init__(self, generator, constants):
        self.generator, self.constants = generator, constants

    def call_JitFunction(self, function, values, kwargs):
        return self.generator.call_JitFunction(function, [core.tuple(values), *self.constants], kwargs)


@core.builtin
def map_threads(function, tensors, constants, _semantic=None, _generator=None):
    """Calls `function` in each thread with a tuple of all its values of `tensors`, one tensor after another.

    It is called with `constants` too, and returns as many values for each tensor of the result. It must be free of side
    effects; a whole warp may vote and shuffle where all of it goes the same way. Gluon's map_elementwise, of Triton 3.6
    and 3.7, has an argument for each value in place of the tuple.
    """
    pack = tensors[0].numel.value // 128
    generator = _OneTuple(_generator, [core.constexpr(x) for x in constants])
    return core.map_elementwise(function, *tensors, pack=pack, _semantic=_semantic, _generator=generator)


@gluon.jit
def along_rows(x, like):
    """x [64, 8] over and over, in the shape and the layout of `like` [64, N]; moves nothing."""
    for _ in gl.static_range(_doublings(like.shape[1])):
        x = gl.reshape(gl.permute(gl.join(x, x), [0, 2, 1]), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def first_columns(x):
    """The inverse: the first eight columns of x [64, N]."""
    for _ in gl.static_range(_doublings(x.shape[1])):
        x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return gl.convert_layout(x, PER_ROW, assert_trivial=True)


@gluon.jit
def in_order_of_threads(x):
    """An accumulator x [64, N] as [2 N, 32] with eight threads' four numbers in a row; moves nothing.

    Of the bits of a number's place there, the lowest is that of its column, then come bit 3 of its row, bits 1 and 2 of
    the column, 0 to 2, 4 and 5 of the row, and the rest of the column.
    """
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [x.shape[3] * 16, 32])


@gluon.constexpr_function
def _doublings(n):
    return (n // 8).bit_length() - 1


@gluon.jit
def keep_columns(x, start, end, OTHERWISE: gl.constexpr):
    """x [M, N] where start <= column < end, elsewhere OTHERWISE; start and end [M], in the layout of x's rows.

    x is fp32 in the layout of a warpgroup's accumulator, N at most 128.
    """
    n: gl.constexpr = x.shape[1] // 2  # a thread holds two rows' quarters
    start, end = gl.expand_dims(start, 1), gl.expand_dims(end, 1)
    return gl.inline_asm_elementwise(_asm(n, OTHERWISE), _constraints(n), [x, start, end], gl.float32, True, n)


@gluon.constexpr_function
def _asm(n, otherwise):
    # Of a thread's n values, pairs of columns of row i and of row i + 8 take turns. Bit 2 g + e of a row's mask is
    # column 8 g + 2 (lane % 4) + e.
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
    # the bits of the columns before the operand: two for each whole group of 8, and of the next one 0 to 2
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
