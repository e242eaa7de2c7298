"""The running softmax of the forward kernel, and how its probabilities and output travel in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash_attention.hopper.columns import keep_columns
from kernels.flash_attention.scores import cap

# Stands for an invisible score and for the maximum of nothing. A power of two: its product with the scale is exact,
# so that fma(s, c, -m * c) is 0 for a row that has seen nothing else, and never infinite.
HIDDEN = gl.constexpr(-(2.0**99))
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
_COLUMNS = gl.constexpr(8)  # of the sums that `PARTS` keeps of each row, two in each of four threads
_SKIPPED = gl.constexpr(8.0)  # the maximum may lag by 2^8: probabilities stay far from what fp16 and bf16 hold


@gluon.jit
def scale_to_log2(softmax_scale, HAS_SOFTCAP: gl.constexpr):
    """What turns scores into exponents of two; `cap` has done it already."""
    scale = softmax_scale * LOG2_E
    if HAS_SOFTCAP:
        scale = 1.0
    return scale


@gluon.jit
def begin(sink, zeros, ROW: gl.constexpr, HAS_SINKS: gl.constexpr, PARTS: gl.constexpr):
    """The maximum [M] and the sum of rows that have seen nothing, or only a sink, given in units of scores."""
    rows: gl.constexpr = zeros.shape[0]
    if HAS_SINKS:  # a logit that every row sees and that has no value
        row_max = gl.full([rows], 1.0, gl.float32, layout=ROW) * sink
        row_sum = gl.full([rows], 1.0, gl.float32, layout=ROW)
    else:
        row_max = gl.full([rows], HIDDEN, gl.float32, layout=ROW)
        row_sum = gl.zeros([rows], gl.float32, layout=ROW)
    if PARTS:
        parts = _part_sums(zeros)
        is_first = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, parts.type.layout)) == 0
        row_sum = gl.where(gl.expand_dims(is_first, 0), _beside(row_sum, parts) + parts, 0.0)
    return row_max, row_sum


@gluon.jit
def raise_maximum(scores, row_max, softmax_scale, softcap, key, key_start, key_end, at_edge,
                  dtype: gl.constexpr, MASK: gl.constexpr, HAS_SOFTCAP: gl.constexpr, SKIP: gl.constexpr):  # fmt: skip
    """The scores [M, N] of the keys from `key` on, capped and masked, the new running maximum, and the factor for what
    was summed under the old one; maxima in units of scores.

    MASK is `always`, `never`, or `at_edge`: where that is true. SKIP keeps the old maximum, and so a factor of 1, where
    the new one is not much larger: `rescale` has nothing to do.
    """
    to_log2 = scale_to_log2(softmax_scale, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        scores, _ = cap(scores, softmax_scale, softcap, dtype)
    if MASK == "always":
        scores = keep_columns(scores, key_start - key, key_end - key, HIDDEN)
    elif MASK == "at_edge":
        if at_edge:
            scores = keep_columns(scores, key_start - key, key_end - key, HIDDEN)
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    if SKIP:
        new_max = gl.where((new_max - row_max) * to_log2 > _SKIPPED, new_max, row_max)
    return scores, new_max, gl.exp2((row_max - new_max) * to_log2)


@gluon.jit
def exponentials(scores, row_max, row_sum, factor, softmax_scale, dtype: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                 PARTS: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """p [M, N] under the maximum, and the sum with them; what raise_maximum gave.

    PARTS leaves the sum in parts, so that no step waits for the other threads of a row; PACKED gives p as pairs of
    `dtype` in [M, N / 2] registers.
    """
    to_log2 = scale_to_log2(softmax_scale, HAS_SOFTCAP)
    p = gl.exp2(scores * to_log2 - gl.expand_dims(row_max * to_log2, 1))
    if PARTS:
        parts = _part_sums(p)
        row_sum = row_sum * _beside(factor, parts) + parts
    else:
        row_sum = row_sum * factor + gl.sum(p, 1)
    if PACKED:
        p = _pack(p, dtype)
    return p, row_sum


@gluon.jit
def total(row_sum, ROW: gl.constexpr, PARTS: gl.constexpr):
    """The sum [M] of what `exponentials` kept."""
    if PARTS:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    return row_sum


@gluon.jit
def operand(p, dtype: gl.constexpr, OUT: gl.constexpr, PACKED: gl.constexpr):
    """p as the first operand, in registers, of the product that gives o in the layout OUT."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    if PACKED:
        p = _unpack(p, dtype, layout)
    else:
        p = gl.convert_layout(p.to(dtype), layout)
    return p


@gluon.jit
def rescale(o, factor, SKIP: gl.constexpr):
    """o [M, D] times factor [M]; SKIP jumps over it where all 16 rows of a warp have a factor of 1."""
    OUT: gl.constexpr = o.type.layout
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUT)), 1)
    if SKIP:
        n: gl.constexpr = o.shape[1] // 2  # a thread holds two rows' quarters
        o = gl.inline_asm_elementwise(_multiply_asm(n), _multiply_constraints(n), [o, factor], gl.float32, False, n)
    else:
        o = o * factor
    return o


@gluon.jit
def _part_sums(p):
    """[M, 8]: sums over every eighth column, all of a part's in one thread."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // _COLUMNS, _COLUMNS]), 1)


@gluon.jit
def _beside(row, parts):
    return gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, parts.type.layout)), 1)


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)
    else:
        pairs = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)
    return pairs


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1)
    p = gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.constexpr_function
def _multiply_asm(n):
    # of n values, pairs of columns of row i and of row i + 8 take turns
    lines = ["{", ".reg .pred p, r;", f"setp.neu.f32 p, ${2 * n}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;", "vote.sync.any.pred r, p, 0xffffffff;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines += ["@!r bra.uni SKIPPED;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return "\n".join([*lines, "SKIPPED:", "}"])


@gluon.constexpr_function
def _multiply_constraints(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n))
