"""2^x with a part of it on the FMA pipe, as FlashAttention-4 has it, for loops that wait for the exponential unit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))


@gluon.jit
def exp2(x, OF_8: gl.constexpr):
    """2^x of fp32 x below 127.5, less than 2^-126 or 0 below -126, NaN of NaN; of 8 neighbours OF_8 by a polynomial.

    That is of degree 3 in x's distance from a whole number, and off by 1.02e-4 of the result at most. From 127.5 on it
    is infinite or any number: for scores that a mask puts another in the place of.
    """
    if OF_8 == 0:
        return gl.exp2(x)
    return gl.inline_asm_elementwise(_asm(OF_8), _CONSTRAINTS, [x], gl.float32, True, 8)


@gluon.constexpr_function
def _asm(of_8):
    lines = ["{", ".reg .f32 y, whole, part, p;", ".reg .b32 bits;"]
    for i in range(8):
        if i * of_8 % 8 >= of_8:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${8 + i};")  # as gl.exp2; without ftz three instructions more
            continue
        lines += [
            f"max.NaN.f32 y, ${8 + i}, 0fC2FE0000;",  # -127
            "add.rn.f32 whole, y, 0f4B40007F;",  # 1.5 x 2^23 + 127: y rounded, and 127, are in the last bits
            "sub.rn.f32 part, whole, 0f4B40007F;",
            "sub.rn.f32 part, y, part;",  # -0.5 to 0.5
            "fma.rn.f32 p, part, 0f3D615107, 0f3E780629;",
            "fma.rn.f32 p, p, part, 0f3F317AFE;",
            "fma.rn.f32 p, p, part, 0f3F800000;",  # 1, so that whole numbers are exact
            "mov.b32 bits, whole;",
            "shl.b32 bits, bits, 23;",  # of 2^whole, and of 0 where that is -127
            "mov.b32 whole, bits;",
            f"mul.rn.f32 ${i}, p, whole;",
        ]
    return "\n".join([*lines, "}"])
