"""The online softmax recurrence of the portable kernels (arXiv:1805.02867; arXiv:2307.08691, section 3.1)."""

import triton
import triton.language as tl


@triton.jit
def online_softmax_step(scores, row_max, row_sum, scale_log2, MASKED: tl.constexpr):
    """Updates the running maximum and sum of M rows with one block of scores [M, N].

    Returns (p, rescale, new_max, new_sum). p is 2^(scores * scale_log2 - new_max) [M, N]. The caller must multiply its
    sum of P V over earlier blocks by `rescale` [M], because the maximum may have changed. new_sum [M] is the sum of
    2^(scores * scale_log2 - new_max) over all blocks so far. new_max [M] is in log2 units. Scores can be -inf only if
    the argument `MASKED` is true. The sum of a row stays 0 while all scores of the row are -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    if MASKED:
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - (-inf) is NaN
    else:
        finite_max = new_max
    p = tl.math.exp2(scores * scale_log2 - finite_max[:, None])
    rescale = tl.math.exp2(row_max - finite_max)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, axis=1)
