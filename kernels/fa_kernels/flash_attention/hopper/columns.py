"""Which columns of a block are seen, as bits of a register: a third of the instructions of two comparisons each.

ptxas turns tests of single bits into R2P, which moves seven of them into predicates at once. In the loop over masked
blocks of the forward at head_dim 128, as it was then, that left 623 instructions of 764, and no spills at 64 where
there had been 436 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
