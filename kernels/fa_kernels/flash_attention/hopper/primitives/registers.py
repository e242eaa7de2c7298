"""Functions of the values of an accumulator that a thread holds in registers.

Of a warpgroup's accumulator [64, N] a thread holds N / 2 values: a pair of adjacent columns of row i, the same pair of
row i + 8, then the pairs eight columns on. PER_ROW [64, 8] is such an accumulator with one value for each row: the
value fills all eight columns, or is the sum of them. A thread holds four values of it.

Rows of fp32 are stored to shared memory 8 bytes at a time, and pairs of threads hit the same banks. If the order in
memory is free, `in_order_of_threads` stores 16 bytes of a thread at a time, in half the cycles.

`keep_columns` holds a row's visible columns as bits of a register. ptxas turns tests of single bits into R2P, which
moves seven of them to predicates at once: a third of the instructions of two comparisons for each element.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

PER_ROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


@gluon.constexpr_function
def accumulator(n):
    """The layout of a warpgroup's accumulator [64, n]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def operand(n):
    """The layout of a first operand in registers, for an accumulator [64, n]."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(n), k_width=2)


class _OneTuple:
    """A code generator that calls a function with one tuple, and constants, for the arguments it is given."""

    def __init__(self, generator, constants):
        self.generator, self.constants = generator, constants

    def call_JitFunction(self, function, values, kwargs):
        return self.generator.call_JitFunction(function, [core.tuple(values), *self.constants], kwargs)


@core.builtin
def map_threads(function, tensors, constants, _semantic=None, _generator=None):
    """Calls `function` in each thread with a tuple of all its values of `tensors`, one tensor after another.

    `constants` are further arguments. The function returns as many values for each tensor of the result. It must have
    no side effects. It may vote and shuffle where the whole warp takes the same path. Gluon's map_elementwise (Triton
    3.6 and 3.7) passes each value as an argument instead of a tuple.
    """
    pack = tensors[0].numel.value // 128
    generator = _OneTuple(_generator, [core.constexpr(x) for x in constants])
    return core.map_elementwise(function, *tensors, pack=pack, _semantic=_semantic, _generator=generator)


@gluon.jit
def along_rows(x, like):
    """Repeats x [64, 8] along the columns, in the shape and the layout of `like` [64, N]. Moves no data."""
    for _ in gl.static_range(_doublings(like.shape[1])):
        x = gl.reshape(gl.permute(gl.join(x, x), [0, 2, 1]), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def first_columns(x):
    """Returns the first eight columns of x [64, N]: the inverse of `along_rows`."""
    for _ in gl.static_range(_doublings(x.shape[1])):
        x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return gl.convert_layout(x, PER_ROW, assert_trivial=True)


@gluon.jit
def in_order_of_threads(x):
    """Views an accumulator x [64, N] as [2 N, 32], with four values of each of eight threads in a row. Moves no data.

    The bits of an element's index in that view, from the lowest: bit 0 of its column, bit 3 of its row, bits 1 and 2 of
    the column, bits 0 to 2, 4 and 5 of the row, and the other bits of the column.
    """
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [x.shape[3] * 16, 32])


@gluon.constexpr_function
def _doublings(n):
    return (n // 8).bit_length() - 1


@gluon.jit
def keep_columns(x, start, end, OTHERWISE: gl.constexpr):
    """Returns x [M, N] where start <= column < end, and OTHERWISE elsewhere. start, end: [M].

    x is fp32 in the layout of a warpgroup's accumulator, start and end in that of its rows. N is at most 128.
    """
    n: gl.constexpr = x.shape[1] // 2  # two rows, a quarter of each
    start, end = gl.expand_dims(start, 1), gl.expand_dims(end, 1)
    return gl.inline_asm_elementwise(_asm(n, OTHERWISE), _constraints(n), [x, start, end], gl.float32, True, n)


@gluon.constexpr_function
def _asm(n, otherwise):
    # A thread's n values alternate between pairs of row i and of row i + 8. Bit 2 g + e of a row's mask is column
    # 8 g + 2 (lane % 4) + e.
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
    # The bits of the columns before the operand: two for each whole group of 8, and 0 to 2 of the next group.
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
