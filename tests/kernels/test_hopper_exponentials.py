"""2^x of which the Hopper kernels take a part by polynomials: their PTX, worked by numpy, and compiled on a GPU."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash_attention.hopper.exponentials import _asm, exp2

ON_FLOATS: dict[str, Callable[..., Any]] = {
    "max.NaN.f32": np.maximum,
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "ex2.approx.ftz.f32": np.exp2,
}
ON_BITS: dict[str, Callable[..., Any]] = {"mov.b32": np.copy, "shl.b32": np.left_shift}


def by_numpy(x: Tensor, of_8: int) -> Tensor:
    """What the PTX gives for x, fp32, of which a thread has eight in a row."""
    registers = {f"${8 + i}": column for i, column in enumerate(x.view(-1, 8).T.contiguous().numpy())}

    def value(operand):
        if operand in registers:
            return registers[operand]
        number = int(operand[2:], 16) if operand[:2] in ("0f", "0x") else int(operand)
        return np.uint32(number).view(np.float32)

    for line in _asm(of_8).split("\n"):
        match = re.fullmatch(r"([a-z][\w.]+) (\S+), (.*);", line)
        if not match:
            assert line in "{}" or line.startswith(".reg"), line
            continue
        instruction, result, operands = match[1], match[2], [value(operand) for operand in match[3].split(", ")]
        if instruction in ON_FLOATS:
            registers[result] = ON_FLOATS[instruction](*operands)
        else:
            bits = [operand.view(np.uint32) for operand in operands]
            registers[result] = ON_BITS[instruction](*bits).view(np.float32)
    return torch.stack([torch.from_numpy(registers[f"${i}"]) for i in range(8)], 1).flatten()


@gluon.jit
def _kernel(x_ptr, y_ptr, OF_8: gl.constexpr):
    offsets = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(y_ptr + offsets, exp2(gl.load(x_ptr + offsets), OF_8))


def by_gpu(x: Tensor, of_8: int) -> Tensor:
    x = x.cuda()
    y = torch.empty_like(x)
    _kernel[(len(x) // 1024,)](x, y, of_8)
    return y.cpu()


@pytest.mark.parametrize("of_8", [1, 2, 8])
@pytest.mark.parametrize("run", [by_numpy, pytest.param(by_gpu, marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and infinity
def test_exp2(run, of_8):
    x = torch.linspace(-126, 127.49, 2**20)
    x[:16] = torch.tensor([-torch.inf, torch.nan] * 8)
    x[16:32] = torch.tensor([-127.0, -1e30, -126.3, -126.5, -126.7, -128.0, -150.0, -126.01] * 2)
    x[32:48] = torch.arange(16.0) - 8
    y = run(x, of_8)
    assert y[1:16:2].isnan().all()
    assert not y[:16:2].any()
    assert not (y[16:32] > 2.0**-126).any()
    exact = x[32:].double().exp2()
    error = ((y[32:].double() - exact) / exact).abs().view(-1, 8)
    assert (error.amax(0) < 1e-6).sum() == 8 - of_8  # of a thread's neighbours
    assert error.max() < 1.02e-4
    assert error[:2].max() < 1e-6, "whole numbers are exact"
