"""Tests the helper function that computes online softmax in the kernels."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fa_kernels.flash_attention.softmax import online_softmax_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _recurrence_kernel(scores_ptr, values_ptr, maxima_ptr, sums_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1], tl.float32)
    for block in range(N // BLOCK):
        cols = block * BLOCK + tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + cols)[None, :]
        p, rescale, row_max, row_sum = online_softmax_step(scores, row_max, row_sum, 1.4426950408889634, True)
        acc = acc * rescale + tl.sum(p * tl.load(values_ptr + cols)[None, :], axis=1)
        tl.store(maxima_ptr + block + tl.arange(0, 1), row_max * 0.6931471805599453)
        tl.store(sums_ptr + block + tl.arange(0, 1), row_sum)
    tl.store(out_ptr + tl.arange(0, 1), acc / row_sum)


def recurrence(scores, values, block=2):
    """Returns the running maximum and sum after each block, and the softmax-weighted mean of the values."""
    scores, values = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in (scores, values))
    maxima, sums = (torch.empty(len(scores) // block, device=DEVICE) for _ in range(2))
    out = torch.empty(1, device=DEVICE)
    _recurrence_kernel[(1,)](scores, values, maxima, sums, out, len(scores), block)
    return maxima.tolist(), sums.tolist(), out.item()


def test_running_maxima_and_sums_are_those_of_the_recurrence():
    maxima, sums, _ = recurrence([1, 3, 2, 5, 4, 0], [0.0] * 6)
    assert maxima == pytest.approx([3, 5, 5], rel=1e-6)
    assert sums == pytest.approx([1.1353, 1.2035, 1.578], abs=1e-4)


def test_blocks_of_two_equal_the_dense_softmax():
    _, _, out = recurrence([2, 3, 5, 4], [10, 20, 30, 40])
    weights = torch.tensor([2.0, 3, 5, 4]).softmax(0)
    assert out == pytest.approx(float(weights @ torch.tensor([10.0, 20, 30, 40])), rel=1e-6)


def test_a_block_that_is_masked_whole_changes_nothing():
    maxima, sums, out = recurrence([-math.inf, -math.inf, 2, 3, -math.inf, -math.inf], [9.0, 9, 1, 2, 9, 9])
    assert maxima[0] == -math.inf and maxima[1:] == pytest.approx([3, 3])
    assert sums == pytest.approx([0, 1 + math.exp(-1), 1 + math.exp(-1)])
    assert out == pytest.approx((2 + math.exp(-1)) / (1 + math.exp(-1)))
