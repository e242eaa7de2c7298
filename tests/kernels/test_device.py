"""Kernels other than attention run on the GPU of their inputs, even if another GPU is the current one."""

import pytest
import torch
from torch import Tensor

from fa_kernels.glu import glu, glu_gradient
from fa_kernels.rmsnorm import add_rms_norm
from fa_kernels.rotary import rotate_heads
from fa_kernels.rows import add_rows, copy_rows


def results(x: Tensor, index: Tensor) -> list[Tensor]:
    """Runs each kernel on x, (rows, dim). index: (rows,) int32, a permutation of the rows."""
    rows, dim = x.shape
    leaf = x.clone().requires_grad_()
    total, y = add_rms_norm(leaf, leaf, x[0], 1e-5, x.dtype, keep_sum=True)
    gradients = torch.autograd.grad(total.sum() + y.sum(), leaf)
    heads = x.view(rows, 2, dim // 2)
    angles = x[:, : dim // 4].contiguous()
    rotated = rotate_heads(heads, angles, angles, 1)
    copied, added = torch.empty_like(heads), heads.clone()
    copy_rows([heads], [copied], from_rows=index)
    add_rows([added], [heads], index, index, torch.arange(rows + 1, dtype=torch.int32, device=x.device))
    halves = glu(x, "swiglu"), glu_gradient(x, x[:, : dim // 2].contiguous(), "swiglu")
    return [total.detach(), y.detach(), *gradients, rotated, copied, added, *halves]


@pytest.mark.gpu
def test_kernels_run_on_the_gpu_of_their_inputs():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(6, 32, device="cuda:1")
    index = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32, device="cuda:1")
    with torch.cuda.device(1):
        expected = results(x, index)
    with torch.cuda.device(0):
        assert all(torch.equal(*pair) for pair in zip(results(x, index), expected, strict=True))
        assert torch.cuda.current_device() == 0
