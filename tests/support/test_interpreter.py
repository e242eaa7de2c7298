"""Tests tests.support.interpreter, which speeds up Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.conftest import kernels_are_compiled

pytestmark = pytest.mark.skipif(kernels_are_compiled(), reason="kernels are compiled")


@triton.jit
def _total(x):
    return tl.sum(x * x, axis=0)


@triton.jit
def _square_sum_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """Writes the sum of squares of row i of x (rows, N) to y[i].

    The device function `_total` calls tl.sum, which is a device function of Triton.
    """
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + tl.arange(0, N))
    tl.store(y_ptr + row, tl.maximum(_total(x), 0.0))


def square_sums(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(len(x), dtype=x.dtype)
    _square_sum_kernel[(len(x),)](x, y, N=x.shape[1])
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_device_functions_compute_what_they_say(dtype):
    x = torch.arange(40, dtype=dtype).view(5, 8) % 7
    assert torch.equal(square_sums(x).long(), x.long().square().sum(1))


def test_the_language_is_replaced_once_a_launch_and_put_back(monkeypatch):
    replaced, patch = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: replaced.append(args[0]) or patch(*args))
    square_sums(torch.ones(1, 8))
    once = len(replaced)
    square_sums(torch.ones(9, 8))
    assert len(replaced) == 2 * once > 0
    assert all(tl.core.is_builtin(function) for function in (tl.load, tl.core.load, tl.tensor.__add__, tl.math.exp2))


def test_a_launch_that_fails_puts_it_back_too():
    with pytest.raises(interpreter.InterpreterError):
        square_sums(torch.ones(2, 7))  # 7 columns, which is not a power of two
    assert tl.core.is_builtin(tl.load)
    assert square_sums(torch.ones(2, 8)).tolist() == [8.0, 8.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_overflow_of_integers_is_found(sign):
    row = torch.zeros(1, 8, dtype=torch.int32)
    row[0, 3] = sign * 46340  # the largest integer whose square is less than 2^31
    assert square_sums(row).tolist() == pytest.approx([46340**2])  # tl.maximum in the kernel rounds the result to fp32
    row[0, 3] += sign
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation mul"):
        square_sums(row)
