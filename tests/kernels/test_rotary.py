"""The rotation of heads against complex multiplication in fp64; the kernel itself in the interpreter or on a GPU."""

import pytest
import torch

from kernels import rotary
from kernels.rotary import rotate_heads


def angles(total, half, device):
    turned = torch.rand(total, half, dtype=torch.float64, device=device) * 6.28
    return turned.cos().float(), turned.sin().float()


def turned(x, cos, sin, n_rotated):
    """(total, heads, head_dim) fp64, as complex numbers of the two halves."""
    first, second = x.double().chunk(2, dim=-1)
    z = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    both = torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((both[:, :n_rotated], x[:, n_rotated:].double()), dim=1)


@pytest.fixture(params=["torch", "kernel"])
def implementation(request, device, monkeypatch):
    """On the CPU the operator takes torch; the kernel is then run by the interpreter."""
    if request.param == "kernel" and device.type == "cpu":

        def through_the_kernel(x, cos, sin, n_rotated, dtype, inverse):
            y = torch.empty(x.shape, dtype=dtype)
            half = x.shape[2] // 2
            block_d = 1 << (half - 1).bit_length()
            rotary._rotate_kernel[(-(-x.shape[0] // 4) * x.shape[1],)](
                x, cos, sin, y, x.stride(0), x.stride(1), x.shape[0], x.shape[1], n_rotated,
                INVERSE=inverse, HALF=half, BLOCK_D=block_d, BLOCK_M=4,
            )  # fmt: skip
            return y

        monkeypatch.setattr(rotary, "_rotate_plainly", through_the_kernel)
    elif request.param == "torch" and device.type == "cuda":
        pytest.skip("the GPU takes the kernel")


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("n_heads", "n_rotated", "head_dim"),
    [
        pytest.param(3, 2, 16, id="values-beside"),
        pytest.param(2, 2, 24, id="half-no-power-of-two"),
        pytest.param(1, 0, 8, id="none-rotated"),
    ],
)
@pytest.mark.parametrize("total", [pytest.param(7, id="few"), pytest.param(300, id="blocks-of-tokens")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_complex_multiplication(n_heads, n_rotated, head_dim, total, dtype, device):
    x = torch.randn(total, n_heads, head_dim, device=device).to(dtype).requires_grad_()
    cos, sin = angles(total, head_dim // 2, device)
    y = rotate_heads(x, cos, sin, n_rotated)
    assert y.dtype == dtype and y.is_contiguous()
    precision = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), turned(x.detach(), cos, sin, n_rotated), rtol=precision, atol=precision * 4)
    dy = torch.randn(y.shape, device=device).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = turned(dy, cos, -sin, n_rotated)
    torch.testing.assert_close(dx.double(), exact, rtol=precision, atol=precision * 4)


@pytest.mark.usefixtures("implementation")
def test_slices_and_other_dtypes(device):
    """Heads out of a wider row, rounded to what attention takes; the gradient comes back in x's dtype."""
    row = torch.randn(5, 4, 16, device=device, requires_grad=True)
    cos, sin = angles(5, 8, device)
    y = rotate_heads(row[:, 1:3], cos, sin, 2, torch.float16)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), turned(row.detach()[:, 1:3], cos, sin, 2), rtol=2e-3, atol=2e-3)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), row)
    assert gradient.dtype == torch.float32
    assert not gradient[:, [0, 3]].any() and gradient[:, 1:3].all()


def test_operator_registration(device):
    x = torch.randn(5, 3, 8, device=device, requires_grad=True)
    torch.library.opcheck(rotary._rotate, (x, *angles(5, 4, device), 2, torch.float32, False))


def test_empty(device):
    assert rotate_heads(torch.zeros(0, 2, 8, device=device), *angles(0, 4, device), 2).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("shape", "table", "n_rotated", "message"),
    [
        pytest.param((4, 2, 8), (4, 8), 2, r"cos and sin must be .* got \(4, 8\)", id="width"),
        pytest.param((4, 2, 8), (3, 4), 2, r"got \(3, 4\) and \(3, 4\) for x \(4, 2, 8\)", id="tokens"),
        pytest.param((4, 2, 7), (4, 3), 2, "even head_dim", id="odd"),
        pytest.param((4, 2, 8), (4, 4), 3, "n_rotated must be between 0 and n_heads=2; got 3", id="heads"),
    ],
)
def test_mistakes_are_named(shape, table, n_rotated, message):
    with pytest.raises(ValueError, match=message):
        rotate_heads(torch.zeros(shape), torch.zeros(table), torch.zeros(table), n_rotated)
