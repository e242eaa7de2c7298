"""2^x of which the Hopper kernels take a part by polynomials, on a GPU."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash_attention.hopper.exponentials import exp2

pytestmark = pytest.mark.gpu


@gluon.jit
def _kernel(x_ptr, y_ptr, OF_8: gl.constexpr):
    offsets = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(y_ptr + offsets, exp2(gl.load(x_ptr + offsets), OF_8))


@pytest.mark.parametrize("of_8", [0, 2, 8])
def test_exp2(of_8):
    x = torch.linspace(-126, 126, 2**20, device="cuda")
    x[:16] = torch.tensor([-torch.inf, torch.nan] * 8)
    x[16:32] = torch.tensor([-127.0, -1e30] * 8)
    x[32:48] = torch.arange(16.0) - 8
    y = torch.empty_like(x)
    _kernel[(len(x) // 1024,)](x, y, of_8)
    assert y[1:16:2].isnan().all()
    assert not y[:16:2].any()
    assert not (y[16:32] > 2.0**-126).any()
    exact = x[32:].double().exp2()
    error = ((y[32:].double() - exact) / exact).abs().view(-1, 8)
    assert (error.amax(0) < 1e-6).sum() == 8 - of_8  # of a thread's neighbours
    assert error.max() < 1.02e-4
    assert error[:2].max() < 1e-6, "whole numbers are exact"
