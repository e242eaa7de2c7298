"""Compares SwiGLU and GeGLU with autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels import glu as module
from fa_kernels.glu import UNITS, glu, glu_backward, glu_gradient

SHAPES = pytest.mark.parametrize(
    ("rows", "ffn_dim"),
    [
        pytest.param(5, 24, id="less-than-a-block"),
        pytest.param(2, module.BLOCK, id="one-block"),
        pytest.param(3, 2 * module.BLOCK + 40, id="blocks-and-a-part"),
    ],
)
EACH = pytest.mark.parametrize("unit", UNITS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def through_the_kernel(projected: Tensor, unit: str) -> Tensor:
    rows, ffn_dim = projected.shape[0], projected.shape[1] // 2
    activated = projected.new_empty(rows, ffn_dim)
    module._forward_kernel[module._grid(rows, ffn_dim)](projected, activated, ffn_dim, unit == "geglu", module.BLOCK)
    return activated


def through_the_backward_kernel(projected: Tensor, d_activated: Tensor, d_projected: Tensor, unit: str) -> None:
    rows, ffn_dim = d_activated.shape
    module._backward_kernel[module._grid(rows, ffn_dim)](
        projected, d_activated, d_projected, ffn_dim, unit == "geglu", module.BLOCK
    )


@pytest.fixture(params=["torch", "kernel"])
def implementation(request, device, monkeypatch):
    """On the CPU, runs a test with torch's implementation and with the kernels.

    To run the kernels on the CPU, this fixture puts the kernels in the place of torch's implementation.
    """
    if request.param == "kernel" and device.type == "cpu":
        monkeypatch.setattr(module, "_forward_plainly", through_the_kernel)
        monkeypatch.setattr(module, "_backward_plainly", through_the_backward_kernel)
    elif request.param == "torch" and device.type == "cuda":
        pytest.skip("the GPU takes the kernels")


def draw(rows: int, ffn_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    projected = 3 * torch.randn(rows, 2 * ffn_dim, device=device)
    projected[0, 0], projected[-1, ffn_dim - 1] = -200.0, 200.0  # exp(200) overflows, and sigmoid(200) is 1
    return projected.to(dtype), torch.randn(rows, ffn_dim, device=device).to(dtype)


def exactly(projected: Tensor, d_activated: Tensor, unit: str) -> tuple[Tensor, Tensor]:
    """Returns the activations and the gradient of `projected`, computed in fp64."""
    projected = projected.double().requires_grad_()
    gate, value = projected.chunk(2, dim=1)
    activated = (F.silu(gate) if unit == "swiglu" else F.gelu(gate, approximate="tanh")) * value
    (d_projected,) = torch.autograd.grad(activated, projected, d_activated.double())
    return activated.detach(), d_projected


@pytest.mark.usefixtures("implementation")
@SHAPES
@DTYPES
@EACH
def test_equals_autograd(unit, rows, ffn_dim, dtype, device):
    projected, d_activated = draw(rows, ffn_dim, dtype, device)
    activated, d_projected = exactly(projected, d_activated, unit)
    eps = torch.finfo(dtype).eps
    # Rounding sigmoid near 1 changes it by up to eps / 2, and GELU's derivative by up to 14 eps (at a gate of 4.5).
    of_derivative = 14 * float((projected[:, ffn_dim:] * d_activated).abs().max()) if unit == "geglu" else 0.0
    of_derivative *= dtype == torch.float32  # in fp16, rounding the result causes a larger error
    tolerance = {"rtol": 4 * eps, "atol": max(4.0, of_derivative) * eps}
    ours = glu(projected, unit)
    assert ours.dtype == dtype and ours.is_contiguous()
    torch.testing.assert_close(ours.double(), activated, **tolerance)
    before, beside = projected.clone(), d_activated.clone()
    ours = glu_gradient(projected, beside, unit)
    assert torch.equal(projected, before) and ours.dtype == dtype and ours.is_contiguous()
    torch.testing.assert_close(beside.double(), activated, **tolerance)
    torch.testing.assert_close(ours.double(), d_projected, **tolerance)
    glu_backward(projected, d_activated, unit)
    torch.testing.assert_close(d_activated.double(), activated, **tolerance)
    torch.testing.assert_close(projected.double(), d_projected, **tolerance)


@pytest.mark.gpu
@SHAPES
@EACH
def test_bf16_is_rounded_once(unit, rows, ffn_dim, device):
    """The test needs a GPU, because Triton's interpreter computes bf16 incorrectly."""
    projected, d_activated = draw(rows, ffn_dim, torch.bfloat16, device)
    activated, d_projected = exactly(projected, d_activated, unit)
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(glu(projected, unit).double(), activated, rtol=eps, atol=eps)
    torch.testing.assert_close(
        glu_gradient(projected, d_activated.clone(), unit).double(), d_projected, rtol=eps, atol=eps
    )
    glu_backward(projected, d_activated, unit)
    torch.testing.assert_close(d_activated.double(), activated, rtol=eps, atol=eps)
    torch.testing.assert_close(projected.double(), d_projected, rtol=eps, atol=eps)


@pytest.mark.parametrize("operator", [glu_backward, glu_gradient], ids=["backward", "gradient"])
def test_operators_pass_opcheck(operator, device):
    torch.library.opcheck(operator, (*draw(3, 8, torch.float32, device), "geglu"))


@pytest.mark.gpu
def test_offsets_may_exceed_31_bits(device):
    rows, ffn_dim = 2**17 + 1, 8192
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB")
    projected = torch.zeros(rows, 2 * ffn_dim, dtype=torch.float16, device=device)
    last, d_activated = draw(1, ffn_dim, torch.float16, device)
    projected[-1:] = last
    activated, d_projected = exactly(last, d_activated, "swiglu")
    d_rows = torch.zeros(rows, ffn_dim, dtype=torch.float16, device=device)
    d_rows[-1:] = d_activated
    ours = glu(projected, "swiglu")
    torch.testing.assert_close(ours[-1:].double(), activated, rtol=4e-3, atol=4e-3)
    assert not ours[:-1].any()
    del ours
    glu_backward(projected, d_rows, "swiglu")
    torch.testing.assert_close(projected[-1:].double(), d_projected, rtol=4e-3, atol=4e-3)
    assert not projected[:-1].any()
