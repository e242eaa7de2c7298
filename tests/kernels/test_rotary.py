"""The rotation of heads against complex multiplication in fp64; the kernel itself in the interpreter or on a GPU."""

import pytest
import torch

from kernels import rotary
from kernels.rotary import rotate_and_split, rotate_heads


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

        def through_the_kernel(parts, cos, sin, n_rotated, dtype, inverse):
            y = torch.empty(len(cos), sum(x.shape[1] for x in parts), parts[0].shape[2], dtype=dtype)
            rotary._launch(parts, cos, sin, y, n_rotated, inverse)
            return y

        monkeypatch.setattr(rotary, "_rotate_plainly", through_the_kernel)
        monkeypatch.setattr(rotary, "BLOCK", 64)  # of few tokens
    elif request.param == "torch" and device.type == "cuda":
        pytest.skip("the GPU takes the kernel")


def assert_near(x, exact):
    precision = 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(x.double(), exact, rtol=precision, atol=precision * 4)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        pytest.param((2, 1, 1), 16, id="grouped"),
        pytest.param((1, 1, 1), 24, id="half-no-power-of-two"),
        pytest.param((2, 1, 0), 8, id="no-values"),
        pytest.param((0, 0, 1), 8, id="none-rotated"),
    ],
)
@pytest.mark.parametrize("total", [pytest.param(7, id="few"), pytest.param(30, id="blocks-of-tokens")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_complex_multiplication(heads, head_dim, total, dtype, device):
    n_rotated = heads[0] + heads[1]
    x = torch.randn(total, sum(heads), head_dim, device=device).to(dtype).requires_grad_()
    cos, sin = angles(total, head_dim // 2, device)
    parts = rotate_and_split(x, cos, sin, heads)
    assert [part.shape[1] for part in parts] == [*heads]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    y = torch.cat(parts, dim=1)
    assert y.dtype == dtype
    assert_near(y, turned(x.detach(), cos, sin, n_rotated))
    dy = torch.randn(y.shape, device=device).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.is_contiguous()
    assert_near(dx, turned(dy, cos, -sin, n_rotated))


@pytest.mark.usefixtures("implementation")
def test_gradients_of_any_strides(device):
    """One wide, one with heads first, one that is nowhere dense; and one missing, as of what nobody used."""
    x = torch.randn(6, 7, 8, device=device, requires_grad=True)
    cos, sin = angles(6, 4, device)
    q, k, v = rotate_and_split(x, cos, sin, (4, 2, 1))
    wide = torch.randn(6, 9, 8, device=device)[:, 3:7]
    heads_first = torch.randn(2, 6, 8, device=device).transpose(0, 1)
    scattered = torch.randn(6, 1, 16, device=device)[..., ::2]
    (dx,) = torch.autograd.grad((q, k, v), x, (wide, heads_first, scattered), retain_graph=True)
    assert_near(dx, turned(torch.cat((wide, heads_first, scattered), dim=1), cos, -sin, 6))
    (dx,) = torch.autograd.grad(k, x, heads_first)
    assert_near(dx[:, 4:6], turned(heads_first, cos, -sin, 2))
    assert not dx[:, :4].any() and not dx[:, 6:].any()


@pytest.mark.usefixtures("implementation")
def test_all_heads_in_another_dtype(device):
    """Heads out of a wider row, rounded to what attention takes; the gradient comes back in x's dtype."""
    row = torch.randn(5, 4, 16, device=device, requires_grad=True)
    cos, sin = angles(5, 8, device)
    y = rotate_heads(row[:, 1:3], cos, sin, torch.float16)
    assert y.dtype == torch.float16 and y.is_contiguous()
    torch.testing.assert_close(y.double(), turned(row.detach()[:, 1:3], cos, sin, 2), rtol=2e-3, atol=2e-3)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), row)
    assert gradient.dtype == torch.float32
    assert not gradient[:, [0, 3]].any() and gradient[:, 1:3].all()


def test_gradients_of_gradients(device):
    x = torch.randn(3, 4, 4, dtype=torch.float64, device=device, requires_grad=True)
    cos, sin = angles(3, 2, device)

    def loss(x):
        q, k, v = rotate_and_split(x, cos, sin, (2, 1, 1))
        return (q[:, :1] * k).exp().sum() + v.square().sum()

    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    direction = torch.randn_like(x)
    (second,) = torch.autograd.grad((first * direction).sum(), x)
    step = 1e-3 * direction
    ahead, behind = (
        torch.autograd.grad(loss(y), y)[0]
        for y in ((x + step).detach().requires_grad_(), (x - step).detach().requires_grad_())
    )
    torch.testing.assert_close(second, (ahead - behind) / 2e-3, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parts", [1, 3])
def test_operator_registration(parts, device):
    xs = [torch.randn(5, heads, 8, device=device, requires_grad=True) for heads in (3, 1, 2)[:parts]]
    torch.library.opcheck(rotary._rotate, (xs, *angles(5, 4, device), 2, torch.float32, False))


def test_empty(device):
    nothing = torch.zeros(0, 4, 8, device=device), *angles(0, 4, device)
    assert rotate_heads(*nothing).shape == (0, 4, 8)
    assert [x.shape for x in rotate_and_split(*nothing, (2, 1, 1))] == [(0, 2, 8), (0, 1, 8), (0, 1, 8)]


@pytest.mark.parametrize("rotate", [rotate_heads, lambda x, cos, sin: rotate_and_split(x, cos, sin, (2, 0, 0))])
@pytest.mark.parametrize(
    ("shape", "table", "message"),
    [
        pytest.param((4, 2, 8), (4, 8), r"cos and sin must be .* got \(4, 8\)", id="width"),
        pytest.param((4, 2, 8), (3, 4), r"got \(3, 4\) and \(3, 4\) for x \(4, 2, 8\)", id="tokens"),
        pytest.param((4, 2, 7), (4, 3), "even head_dim", id="odd"),
    ],
)
def test_mistakes_are_named(rotate, shape, table, message):
    with pytest.raises(ValueError, match=message):
        rotate(torch.zeros(shape), torch.zeros(table), torch.zeros(table))


@pytest.mark.parametrize("heads", [(2, 1, 0), (3, 2, -1), (2, 2)])
def test_heads_that_are_not_there(heads):
    with pytest.raises(ValueError, match=r"q, k and v, 4 in all; got \("):
        rotate_and_split(torch.zeros(4, 4, 8), torch.zeros(4, 4), torch.zeros(4, 4), heads)
