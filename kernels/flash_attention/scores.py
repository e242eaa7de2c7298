"""What happens to q . k before the softmax: the scale, a soft cap, ALiBi's bias."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """2^ is the only exponential on the chip; correct to fp32 rounding in absolute terms, also where it saturates."""
    return 1.0 - 2.0 / (tl.math.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def cap(scores, softmax_scale, softcap):
    """softcap * tanh(scale * scores / softcap), in units of log2 (Gemma 2, arXiv:2408.00118), and the tanh."""
    t = tanh(scores * (softmax_scale / softcap))
    return t * (softcap * 1.4426950408889634), t


@triton.jit
def alibi_bias(slope, beside, keys):
    """-slope * distance from the key beside the query, in units of log2 (arXiv:2108.12409).

    slope and beside are of queries and broadcast against keys: [M, 1] with [1, N], or [1, M] with [N, 1].
    A document's last query stands beside its last key.
    """
    return slope * -1.4426950408889634 * tl.abs(beside - keys).to(tl.float32)


@triton.jit
def load_alibi(slopes_ptr, beside_ptr, document_ptr, stride_slopes, rows, head, inside, HAS_ALIBI: tl.constexpr):
    """The slope of each row's document and the key beside it; without ALiBi, two values that nobody reads."""
    if HAS_ALIBI:
        document = tl.load(document_ptr + rows, mask=inside, other=0)
        slope = tl.load(slopes_ptr + document * stride_slopes + head)
        beside = tl.load(beside_ptr + rows, mask=inside, other=0)
    else:
        slope, beside = rows, rows
    return slope, beside
