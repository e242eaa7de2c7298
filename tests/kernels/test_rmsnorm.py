"""Compares RMSNorm of a sum with autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels import rmsnorm as module
from fa_kernels.rmsnorm import add_rms_norm

EPS = 1e-5
SHAPES = pytest.mark.parametrize(
    ("rows", "dim"),
    [
        pytest.param(1, 16, id="one-row"),
        pytest.param(5, 24, id="part-of-a-block"),
        pytest.param(2 * module.PROGRAMS_PER_SM + 3, 32, id="rows-of-a-program"),
    ],
)
# dtypes of x, of the addend and of y: all fp32, mixed as under autocast, and all fp16
DTYPES = pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param((torch.float32, torch.float32, torch.float32), id="fp32"),
        pytest.param((torch.float32, torch.float16, torch.float16), id="mixed"),
        pytest.param((torch.float16, torch.float16, torch.float16), id="fp16"),
    ],
)
KEEP_SUM = pytest.mark.parametrize("keep_sum", [True, False], ids=["sum", "terms"])


@pytest.fixture(params=["torch", "kernel"])
def implementation(request, device, monkeypatch):
    """On the CPU, runs a test with torch's implementation and with the kernels."""
    # pretend that the device has one multiprocessor, so that each program has several rows
    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    if request.param == "kernel" and device.type == "cpu":
        monkeypatch.setattr(module, "_forward_plainly", module._forward_by_kernel)
        monkeypatch.setattr(module, "_backward_plainly", module._backward_by_kernel)
    elif request.param == "torch" and device.type == "cuda":
        pytest.skip("the GPU takes the kernels")


def draw(rows: int, dim: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[Tensor]:
    """Returns random x, addend and weight, and gradients of the sum and of y."""
    x, added, d_sum, dy = (torch.randn(rows, dim, device=device) for _ in range(4))
    weight = 1 + 0.3 * torch.randn(dim, device=device)
    return [x.to(dtypes[0]), added.to(dtypes[1]), weight, d_sum.to(dtypes[0]), dy.to(dtypes[2])]


def results(x: Tensor, added: Tensor, weight: Tensor, d_sum: Tensor, dy: Tensor, keep_sum: bool) -> list[Tensor]:
    """Returns the sum, its RMSNorm, and the gradients of x, the addend and the weight."""
    x, added, weight = leaves = [tensor.clone().requires_grad_() for tensor in (x, added, weight)]
    total, y = add_rms_norm(x, added, weight, EPS, dy.dtype, keep_sum=keep_sum)
    return [total.detach(), y.detach(), *torch.autograd.grad((total, y), leaves, (d_sum, dy))]


def exactly(x: Tensor, added: Tensor, weight: Tensor, d_sum: Tensor, dy: Tensor) -> list[Tensor]:
    """Computes in fp64 what `results` returns. The norm is computed from the sum rounded to the dtype of x."""
    rounding = (x + added).to(x.dtype).double() - (x.double() + added.double())
    leaves = [tensor.double().requires_grad_() for tensor in (x, added, weight)]
    total = leaves[0] + leaves[1] + rounding
    y = F.rms_norm(total, weight.shape, leaves[2], EPS)
    gradients = torch.autograd.grad((total, y), leaves, (d_sum.double(), dy.double()))
    return [total.detach(), y.detach(), *gradients]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("stride", [0, 2])
def test_a_weight_may_have_any_stride(stride, device):
    arguments = draw(5, 24, (torch.float32,) * 3, device)
    x, added, _, d_sum, dy = arguments
    given = torch.randn(48, device=device)
    weight = given[:1].expand(24) if stride == 0 else given[::stride]
    outcomes = []
    for own in (weight, weight.contiguous()):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, added, own)]
        outputs = add_rms_norm(*leaves, EPS, torch.float32, keep_sum=True)
        outcomes.append([*outputs, *torch.autograd.grad(outputs, leaves, (d_sum, dy))])
    assert weight.stride() == (stride,) and all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@pytest.mark.usefixtures("implementation")
@SHAPES
@DTYPES
@KEEP_SUM
def test_equals_autograd(rows, dim, dtypes, keep_sum, device):
    arguments = draw(rows, dim, dtypes, device)
    expected_dtypes = (dtypes[0], dtypes[2], dtypes[0], dtypes[1], torch.float32)
    for ours, exact, dtype in zip(results(*arguments, keep_sum), exactly(*arguments), expected_dtypes, strict=True):
        assert ours.dtype == dtype
        # each result is a sum in fp32, which is rounded once to the result's dtype
        tolerance = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.gpu
@KEEP_SUM
@pytest.mark.parametrize("dim", [768, 2048, 5120, 16384])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_is_accurate_at_the_sizes_of_models(x_dtype, dim, keep_sum, device):
    """The test needs a GPU, because Triton's interpreter computes bf16 incorrectly."""
    arguments = draw(3000, dim, (x_dtype, torch.bfloat16, torch.bfloat16), device)
    for ours, exact in zip(results(*arguments, keep_sum), exactly(*arguments), strict=True):
        eps = torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours.double(), exact, rtol=eps + 1e-5, atol=4 * eps + 1e-4)


@pytest.mark.usefixtures("implementation")
@KEEP_SUM
def test_gradients_may_have_any_layout(keep_sum, device):
    x, added, weight, d_sum, dy = draw(6, 16, (torch.float32,) * 3, device)
    strided = [x.T.contiguous().T, added.T.contiguous().T, weight, d_sum[:1].expand(6, 16), dy.T.contiguous().T]
    dense = [tensor.contiguous() for tensor in strided]
    for ours, expected in zip(results(*strided, keep_sum), results(*dense, keep_sum), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("implementation")
def test_one_output_alone_may_have_a_gradient(device):
    x, added, weight, d_sum, dy = draw(4, 16, (torch.float32,) * 3, device)
    zeros = torch.zeros_like(d_sum)
    for place, arguments in enumerate(((d_sum, zeros), (zeros, dy))):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, added, weight)]
        outputs = add_rms_norm(*leaves, EPS, torch.float32, keep_sum=True)
        ours = torch.autograd.grad(outputs[place], leaves, (d_sum, dy)[place])
        for found, expected in zip(ours, exactly(x, added, weight, *arguments)[2:], strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@KEEP_SUM
def test_only_the_sum_is_kept_if_it_exists(keep_sum, device):
    x, added, weight, *_ = draw(4, 16, (torch.float32, torch.bfloat16, torch.bfloat16), device)
    leaves = [tensor.requires_grad_() for tensor in (x, added, weight)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.data_ptr()), lambda saved: saved):
        total, _ = add_rms_norm(*leaves, EPS, torch.bfloat16, keep_sum=keep_sum)
    assert (total.data_ptr() in kept) == keep_sum
    assert (x.data_ptr() in kept) == (added.data_ptr() in kept) == (not keep_sum)


@pytest.mark.slow
def test_operators_pass_opcheck(device):
    x, added, weight, d_sum, dy = draw(3, 8, (torch.float32, torch.float16, torch.float16), device)
    torch.library.opcheck(module.forward, (x, added, weight, EPS, torch.float16))
    rstd = module.forward(x, added, weight, EPS, torch.float16)[2]
    for other in (added, None):
        torch.library.opcheck(module.backward, (d_sum, dy, x, other, weight, rstd, torch.float16))
        torch.library.opcheck(module.backward, (d_sum, dy, x, other, weight, rstd, torch.float32))


@pytest.mark.parametrize("shapes", [((4, 8), (3, 8), (8,)), ((4, 8), (4, 8), (4,)), ((2, 4, 8), (2, 4, 8), (8,))])
def test_shapes_that_do_not_fit_are_named(shapes, device):
    with pytest.raises(ValueError, match=r"x, added and weight must be \(rows, dim\), \(rows, dim\) and \(dim,\); got"):
        add_rms_norm(*(torch.zeros(s, device=device) for s in shapes), EPS, torch.float32, keep_sum=True)


@pytest.mark.usefixtures("implementation")
def test_there_may_be_no_rows(device):
    x, added, weight, d_sum, dy = draw(0, 8, (torch.float32,) * 3, device)
    *others, d_weight = results(x, added, weight, d_sum, dy, True)
    assert all(tensor.shape == (0, 8) for tensor in others) and not d_weight.any()


@pytest.mark.gpu
def test_offsets_may_exceed_31_bits(device):
    rows, dim = 2**20 + 1, 2048
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB")
    last = draw(1, dim, (torch.float16,) * 3, device)
    arguments = [torch.zeros(rows, dim, dtype=torch.float16, device=device) for _ in range(4)]
    for long, short in zip(arguments, (last[0], last[1], last[3], last[4]), strict=True):
        long[-1:] = short
    ours = results(arguments[0], arguments[1], last[2], arguments[2], arguments[3], True)
    for found, expected in zip(ours, exactly(*last), strict=True):
        found = found if found.dim() == 1 else found[-1:]
        torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3)
    assert not ours[2][:-1].any()
