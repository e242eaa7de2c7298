"""Operations on the attention scores before the softmax: a soft cap and ALiBi's bias."""

import triton
import triton.language as tl

from fa_kernels.device import LOG2_E, interpreted

# triton.jit decides at import whether to interpret kernels, so _INTERPRETED is also computed at import.
_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _reciprocal(x):
    """Computes 1 / x for x from 1 to infinity, within one unit in the last place.

    Triton's division would compile to four times as much code as the instruction rcp.approx.
    """
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, dtype: tl.constexpr):
    """Computes tanh(x) in fp32, where x is score / softcap. `dtype` is the dtype of q and k.

    The forward and the backward pass use the same formula, so that the recomputed P is consistent with lse. bf16 and
    narrower dtypes use the approximate instruction `tanh.approx`. The relative error of `tanh.approx`, 2^-11, is below
    the rounding error of bf16 scores. For fp16 and fp32, tanh(x) is computed as `1 - 2 / (e^(2 * x) + 1)`. With
    `tanh.approx` in fp16, the error of dK could exceed twice the error of torch if all scores of a key are close to the
    soft cap. Each term of dK has the factor `1 - tanh(x)^2`, which is small for scores close to the soft cap.
    """
    if _INTERPRETED:  # the interpreter cannot run PTX
        t = 1.0 - 2.0 / (tl.math.exp2(x * 2.8853900817779268) + 1.0)
    elif dtype == tl.float32 or dtype == tl.float16:
        t = 1.0 - 2.0 * _reciprocal(tl.math.exp2(x * 2.8853900817779268) + 1.0)
    else:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return t


@triton.jit
def cap(scores, softmax_scale, softcap, dtype: tl.constexpr):
    """Applies the soft cap (Gemma 2, arXiv:2408.00118).

    Returns the capped scores softcap * tanh(softmax_scale * scores / softcap) in log2 units, and the tanh alone.
    """
    t = tanh(scores * (softmax_scale / softcap), dtype)
    return t * (softcap * LOG2_E), t


@triton.jit
def alibi_bias(slope, aligned, keys):
    """Computes ALiBi's bias in log2 units: -slope * |aligned - key| (arXiv:2108.12409).

    aligned: the index of the key with which each query is aligned. A document's last query is aligned with the
    document's last key.
    Shapes, for M queries and N keys: `slope` [M, 1], `aligned` [M, 1], `keys` [1, N] -> [M, N]. All shapes can also be
    transposed: `slope` [1, M], `aligned` [1, M], `keys` [N, 1] -> [N, M].
    """
    return slope * -LOG2_E * tl.abs(aligned - keys).to(tl.float32)


@triton.jit
def load_alibi(slopes_ptr, aligned_ptr, document_ptr, stride_slopes, rows, head, inside, HAS_ALIBI: tl.constexpr):
    """Returns ALiBi's slope for each query in `rows`, and the key that each query is aligned with.

    Without ALiBi, the returned values are placeholders that no code uses.
    """
    if HAS_ALIBI:
        document = tl.load(document_ptr + rows, mask=inside, other=0)
        slope = tl.load(slopes_ptr + document * stride_slopes + head)
        aligned = tl.load(aligned_ptr + rows, mask=inside, other=0)
    else:
        slope, aligned = rows, rows
    return slope, aligned
