"""The running softmax of the forward kernel, and operations on probabilities and outputs in registers.

Online softmax (arXiv:1805.02867) subtracts from each score the largest score of the row so far. The exponentials of a
block therefore wait for the block's maximum. In this file, `row_max` is the value that softmax subtracts from the
scores of a row. `row_max` may be less than the largest score of the row. If `row_max` is less than the largest score,
some exponentials are larger than 1, and may overflow. Exponentials up to 2^15 are as accurate as exponentials up to 1,
because fp32 and bf16 have the same relative precision at 2^15 as at 1. Later blocks of a row therefore use the
`row_max` of the row's first block, and do not wait for their own maxima. If a partial sum of a thread's exponentials
exceeds 2^15, the thread's warp increases `row_max` of the affected rows, and computes the exponentials of the block
again. An exponential therefore never exceeds 2^15, which fp16 can represent. In bf16, o is as accurate as torch's o,
because torch rounds P to bf16 too.

By default, scores and probabilities are both in registers until the sum of exponentials is known. With `MAX_FIRST`, the
scores are compared with `row_max` before exponentials are computed. `MAX_FIRST` needs fewer registers than the default,
but more instructions.

Maxima and sums have the layout `registers.PER_ROW`. The sum of a row is stored as eight partial sums, so that the
threads that hold elements of a row do not wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.hopper.primitives.registers import (
    PER_ROW,
    along_rows,
    first_columns,
    keep_columns,
    map_threads,
)
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.structure import structure

# `HIDDEN` is the score of a hidden key, and the row_max of a row that has seen no key. `HIDDEN` is a power of two, so
# `HIDDEN * c` is exact for any scale c, and `fma(HIDDEN, c, -HIDDEN * c)` is 0.
HIDDEN = gl.constexpr(-(2.0**99))
LN_2 = gl.constexpr(0.6931471805599453)
_LARGEST_SUM = gl.constexpr(2.0**15)  # the largest allowed partial sum of one thread's probabilities (`_under`)
_LARGEST_RISE = gl.constexpr(8.0)  # with `MAX_FIRST`, scores may exceed row_max by this many log2 units


@structure
class Exponentials:
    """P of one block of keys, and the running maxima and sums of all rows, including this block.

    The caller must multiply o by `factor`, which is 1 if row_max has not changed. row_sum is already rescaled. row_max
    is in the units of the scores.
    """

    p: gl.tensor  # [M, N / 2], as pairs of 16-bit values
    row_max: gl.tensor  # [M, 8]
    row_sum: gl.tensor
    factor: gl.tensor


@gluon.jit
def scale_to_log2(softmax_scale, HAS_SOFTCAP: gl.constexpr):
    """Returns the factor that converts scores to log2 units.

    With a soft cap, the returned factor is 1, because `cap` returns scores in log2 units.
    """
    scale = softmax_scale * LOG2_E
    if HAS_SOFTCAP:
        scale = 1.0
    return scale


@gluon.jit
def begin(sink, ROWS: gl.constexpr, HAS_SINKS: gl.constexpr):
    """Returns row_max and row_sum [M, 8] of rows that have seen no key. `sink` is in the units of scores."""
    row_sum = gl.zeros([ROWS, 8], gl.float32, layout=PER_ROW)
    row_max = row_sum + (sink if HAS_SINKS else HIDDEN)
    if HAS_SINKS:  # every row sees the sink, which is a score without a value vector
        is_first = gl.arange(0, 8, layout=gl.SliceLayout(0, PER_ROW)) == 0
        row_sum = gl.where(gl.expand_dims(is_first, 0), 1.0, row_sum)
    return row_max, row_sum


@gluon.jit
def cap_and_mask(scores, scale, queries, key, masked, dtype: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """Applies the soft cap and the mask to scores [M, N]. Scores of hidden keys become the constant `HIDDEN`.

    The first column of `scores` belongs to key `key`. If `masked` is false, every query sees all N keys. `masked` may
    be a constant or a value that is known only when the kernel runs.
    """
    if HAS_SOFTCAP:
        scores = cap(scores, scale.softmax, scale.softcap, dtype)[0]
    if masked:
        scores = keep_columns(scores, queries.key_start - key, queries.key_end - key, HIDDEN)
    return scores


@gluon.jit
def exponentials(scores, row_max, row_sum, softmax_scale, dtype: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                 MAX_FIRST: gl.constexpr):  # fmt: skip
    """Computes `Exponentials` of scores [M, N]. The values of p have the given dtype."""
    scale = gl.zeros_like(scores) + scale_to_log2(softmax_scale, HAS_SOFTCAP)
    p, row_max, row_sum, factor = map_threads(
        _of_thread, (scores, along_rows(row_max, scores), along_rows(row_sum, scores), scale), (dtype, MAX_FIRST)
    )
    # One int32 packs the probabilities of two adjacent columns, and `p` holds this int32 in each of the two columns.
    pairs = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))[0]
    return Exponentials(pairs, first_columns(row_max), first_columns(row_sum), first_columns(factor))


@gluon.jit
def operand(pairs, dtype: gl.constexpr, o):
    """Returns p as the first operand of the matmul P V, in registers. `o` is the accumulator of P V."""
    OUT_LAYOUT: gl.constexpr = o.type.layout
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1)
    p = gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def rescale(o, factor):
    """Multiplies each row of o [M, D] by the row's factor.

    `factor` [M, 8] holds the factor of a row in all 8 columns (registers.PER_ROW).
    A warp skips the product if the factors of its 16 rows are all 1.
    """
    n: gl.constexpr = o.shape[1] // 2  # values per thread
    values = [o, along_rows(factor, o)]
    return gl.inline_asm_elementwise(_multiply_asm(n), _multiply_constraints(n), values, gl.float32, False, n)


@gluon.jit
def of_rows(row_max, row_sum, ROW_LAYOUT: gl.constexpr):
    """Returns the maximum and the sum of each row, [M], in the layout ROW_LAYOUT."""
    return gl.convert_layout(gl.max(row_max, 1), ROW_LAYOUT), gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)


@gluon.jit
def _of_thread(values, dtype: gl.constexpr, MAX_FIRST: gl.constexpr):
    """Computes `exponentials` for the elements of one thread, which belong to two rows.

    `values` holds the thread's elements of scores, row_max, row_sum and scale, in this order.
    """
    N: gl.constexpr = len(values) // 4
    max_0, max_1, scale = values[N], values[N + 2], values[3 * N]
    sums = (values[2 * N], values[2 * N + 1], values[2 * N + 2], values[2 * N + 3])
    factor_0, factor_1 = 1.0, 1.0
    if MAX_FIRST:
        new_0, new_1 = _maxima(values, N)
        if _any_thread(gl.maximum((new_0 - max_0) * scale, (new_1 - max_1) * scale) > _LARGEST_RISE):
            new_0, new_1 = _of_four_threads(new_0), _of_four_threads(new_1)
            max_0, factor_0 = _raise(max_0, new_0, (new_0 - max_0) * scale > _LARGEST_RISE, scale)
            max_1, factor_1 = _raise(max_1, new_1, (new_1 - max_1) * scale > _LARGEST_RISE, scale)
        p, block_sums = _under(values, N, max_0 * scale, max_1 * scale, scale, dtype)
    else:
        p, block_sums = _under(values, N, max_0 * scale, max_1 * scale, scale, dtype)
        largest_0, largest_1 = gl.maximum(block_sums[0], block_sums[1]), gl.maximum(block_sums[2], block_sums[3])
        if _any_thread(gl.maximum(largest_0, largest_1) > _LARGEST_SUM):
            new_0, new_1 = _maxima(values, N)
            max_0, factor_0 = _raise(
                max_0, _of_four_threads(new_0), _of_four_threads(largest_0) > _LARGEST_SUM, scale
            )  # fmt: skip
            max_1, factor_1 = _raise(
                max_1, _of_four_threads(new_1), _of_four_threads(largest_1) > _LARGEST_SUM, scale
            )  # fmt: skip
            p, block_sums = _under(values, N, max_0 * scale, max_1 * scale, scale, dtype)
    sums = (
        sums[0] * factor_0 + block_sums[0], sums[1] * factor_0 + block_sums[1],
        sums[2] * factor_1 + block_sums[2], sums[3] * factor_1 + block_sums[3],
    )  # fmt: skip
    maxima, factors = (max_0, max_0, max_1, max_1), (factor_0, factor_0, factor_1, factor_1)
    return p + _repeated(maxima, N) + _repeated(sums, N) + _repeated(factors, N)


@gluon.jit
def _repeated(four, N: gl.constexpr):
    values = ()
    for _ in gl.static_range(N // 4):
        values += four
    return values


@gluon.jit
def _under(scores, N: gl.constexpr, exponent_0, exponent_1, scale, dtype: gl.constexpr):
    """Returns p = 2^(score * scale - exponent), as packed pairs, and four partial sums of p.

    Each int32 packs two values: the values of p for two adjacent columns of a row. The first result contains each int32
    twice, once for each of the two columns. exponent_0 and exponent_1 are row_max of the thread's two rows, in log2
    units. Partial sum i is the sum of the values with the indices i, i + 4, i + 8 and so on. Without `MAX_FIRST`,
    `_of_thread` calls `_under` a second time if a partial sum exceeds `_LARGEST_SUM`. For a row whose row_max does not
    change, the second call of `_under` must return the same bits as the first call. `_under` therefore uses an explicit
    fma. Without an explicit fma, the compiler would use an fma only in the first call. In the second call, the compiled
    code would round `score * scale` before the subtraction.
    """
    p = ()
    sums = (0.0, 0.0, 0.0, 0.0)
    for i in gl.static_range(0, N, 4):
        a = gl.exp2(gl.fma(scores[i], scale, -exponent_0))
        b = gl.exp2(gl.fma(scores[i + 1], scale, -exponent_0))
        c = gl.exp2(gl.fma(scores[i + 2], scale, -exponent_1))
        d = gl.exp2(gl.fma(scores[i + 3], scale, -exponent_1))
        sums = (sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + d)
        of_0, of_1 = _pair(a, b, dtype), _pair(c, d, dtype)
        p += (of_0, of_0, of_1, of_1)
    return p, sums


@gluon.jit
def _maxima(scores, N: gl.constexpr):
    """Returns the largest score that this thread holds in each of its two rows."""
    max_0, max_1 = gl.maximum(scores[0], scores[1]), gl.maximum(scores[2], scores[3])
    for i in gl.static_range(4, N, 4):
        max_0 = gl.maximum(max_0, gl.maximum(scores[i], scores[i + 1]))
        max_1 = gl.maximum(max_1, gl.maximum(scores[i + 2], scores[i + 3]))
    return max_0, max_1


@gluon.jit
def _raise(old, new, rises, scale):
    """Returns the new row_max of one row, and the factor that converts sums from the old to the new row_max.

    row_max changes only if `rises` is true. `rises` depends only on the row's own scores, which four threads hold.
    The bits of a row therefore never depend on other rows, which may belong to later tokens or other documents.
    """
    new = gl.where(rises, gl.maximum(old, new), old)
    return new, gl.exp2((old - new) * scale)


@gluon.jit
def _of_four_threads(x):
    asm: gl.constexpr = """{ .reg .f32 other;
        shfl.sync.bfly.b32 other, $1, 1, 31, -1; max.f32 $0, $1, other;
        shfl.sync.bfly.b32 other, $0, 2, 31, -1; max.f32 $0, $0, other; }"""
    return gl.inline_asm_elementwise(asm, "=&f,f", [x], gl.float32, True, 1)


@gluon.jit
def _any_thread(condition):
    """Returns whether the condition holds in any thread of the warp. All threads of the warp get the same answer."""
    asm: gl.constexpr = """{ .reg .pred p; setp.ne.s32 p, $1, 0;
        vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"""
    return gl.inline_asm_elementwise(asm, "=r,r", [condition.to(gl.int32)], gl.int32, True, 1) != 0


@gluon.jit
def _pair(low, high, dtype: gl.constexpr):
    """Rounds `low` and `high` to `dtype`, and packs them into one register."""
    if dtype == gl.bfloat16:
        pair = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)
    else:
        pair = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)
    return pair


@gluon.constexpr_function
def _multiply_asm(n):
    # A thread's n elements are two elements of row i, two of row i + 8, two of row i, and so on.
    lines = ["{", ".reg .pred p, r;", f"setp.neu.f32 p, ${2 * n}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;", "vote.sync.any.pred r, p, 0xffffffff;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines += ["@!r bra.uni SKIPPED;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return "\n".join([*lines, "SKIPPED:", "}"])


@gluon.constexpr_function
def _multiply_constraints(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n))
