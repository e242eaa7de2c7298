"""Compares rotary embedding with complex multiplication in fp64."""

from collections import Counter

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import checkpoint

from fa_kernels import rotary
from fa_kernels.rotary import rotate_heads, rotate_qkv
from fa_train.models.config import ModelConfig
from fa_train.models.gpt import SelfAttention
from fa_train.models.rope import RotaryTable

HEADS = [4, 2, 2]  # number of heads of q, of k and of v
DIM = 16  # head_dim


def angles(total, half, device):
    angle = torch.rand(total, half, dtype=torch.float64, device=device) * 6.28
    return angle.cos().float(), angle.sin().float()


def rotated(x, cos, sin, n_rotated):
    """Rotates x (total, heads, head_dim) in fp64, as complex numbers."""
    first, second = x.double().chunk(2, dim=-1)
    z = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    both = torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((both[:, :n_rotated], x[:, n_rotated:].double()), dim=1)


@pytest.fixture(params=["torch", "kernel"])
def implementation(request, device, monkeypatch):
    """On the CPU, runs a test with torch's implementation and with the kernel.

    To test the kernel on the CPU, the fixture replaces torch's implementation by the kernel.
    """
    if request.param == "kernel" and device.type == "cpu":

        def through_the_kernel(parts, cos, sin, n_rotated, dtype, inverse):
            total, _, head_dim = parts[0].shape
            y = torch.empty(total, sum(x.shape[1] for x in parts), head_dim, dtype=dtype)
            half = head_dim // 2
            block_d = 1 << (half - 1).bit_length()
            rotary._rotate_kernel[(-(-total // 4) * y.shape[1],)](
                *rotary._arguments(parts, cos, sin, n_rotated, y),
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
@pytest.mark.parametrize(
    "total",
    [
        pytest.param(7, id="few"),
        pytest.param(300 if torch.cuda.is_available() else 40, id="blocks-of-tokens", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_complex_multiplication(n_heads, n_rotated, head_dim, total, dtype, device):
    x = torch.randn(total, n_heads, head_dim, device=device).to(dtype).requires_grad_()
    cos, sin = angles(total, head_dim // 2, device)
    y = rotate_heads(x, cos, sin, n_rotated)
    assert y.dtype == dtype and y.is_contiguous()
    precision = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), rotated(x.detach(), cos, sin, n_rotated), rtol=precision, atol=precision * 4)
    dy = torch.randn(y.shape, device=device).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = rotated(dy, cos, -sin, n_rotated)
    torch.testing.assert_close(dx.double(), exact, rtol=precision, atol=precision * 4)


@pytest.mark.usefixtures("implementation")
def test_heads_may_be_slices_and_are_rounded_once(device):
    row = torch.randn(5, 4, 16, device=device, requires_grad=True)
    cos, sin = angles(5, 8, device)
    y = rotate_heads(row[:, 1:3], cos, sin, 2, torch.float16)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), rotated(row.detach()[:, 1:3], cos, sin, 2), rtol=2e-3, atol=2e-3)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), row)
    assert gradient.dtype == torch.float32
    assert not gradient[:, [0, 3]].any() and gradient[:, 1:3].all()


def draw(device, total=9, dtype=torch.float32):
    qkv = torch.randn(total, sum(HEADS), DIM, device=device).to(dtype).requires_grad_()
    return qkv, *angles(total, DIM // 2, device)


def rotated_then_split(qkv, heads, cos, sin):
    """Computes the same results as rotate_qkv.

    In the backward pass, autograd concatenates the gradients of q, k and v, and rotate_heads then rotates the result.
    """
    return rotate_heads(qkv, cos, sin, heads[0] + heads[1]).split(heads, dim=1)


def dense(x):
    return x


def heads_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def out_of_a_wider_row(x):
    row = torch.randn(x.shape[0], x.shape[1] + 2, x.shape[2] + 8, device=x.device).to(x.dtype)
    row[:, 1:-1, 4:-4] = x
    return row[:, 1:-1, 4:-4]


def last_dimension_strided(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("total", [pytest.param(1, id="token"), pytest.param(9, id="blocks-of-tokens")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param((dense, dense, dense), id="dense"),
        pytest.param((dense, heads_first, out_of_a_wider_row), id="strides-of-their-own"),
        pytest.param((out_of_a_wider_row, last_dimension_strided, dense), id="last-dimension-strided"),
    ],
)
def test_qkv_equals_complex_multiplication(layouts, dtype, total, device):
    qkv, cos, sin = draw(device, total, dtype)
    ours = rotate_qkv(qkv, HEADS, cos, sin)
    assert [x.shape[1] for x in ours] == HEADS and all(x.dtype == dtype for x in ours)
    precision = 2 * torch.finfo(dtype).eps
    exact = rotated(qkv.detach(), cos, sin, 6)
    torch.testing.assert_close(torch.cat(ours, dim=1).double(), exact, rtol=precision, atol=precision * 4)
    gradients = [torch.randn(x.shape, device=device).to(dtype) for x in ours]
    laid_out = [layout(x) for layout, x in zip(layouts, gradients, strict=True)]
    (d_qkv,) = torch.autograd.grad(ours, qkv, laid_out)
    assert d_qkv.is_contiguous()
    exact = rotated(torch.cat(gradients, dim=1), cos, -sin, 6)
    torch.testing.assert_close(d_qkv.double(), exact, rtol=precision, atol=precision * 4)


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("used", ["qkv", "q", "k", "v", "qv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qkv_is_to_the_bit_what_autograd_makes(used, dtype, device):
    qkv, cos, sin = draw(device, dtype=dtype)

    def run(rotated):
        named = dict(zip("qkv", rotated(qkv, HEADS, cos, sin), strict=True))
        y = torch.cat([named[name] ** 3 for name in used], dim=1)
        return y.detach(), *torch.autograd.grad(y, qkv, torch.ones_like(y))

    for ours, expected in zip(run(rotate_qkv), run(rotated_then_split), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
def test_qkv_is_differentiable_to_any_order(device):
    qkv, cos, sin = draw(device)
    exact_qkv = qkv.detach().double().requires_grad_()

    def orders(x, y):
        """Returns four tensors: t0 = sum(y**4), and three gradients t1, t2 and t3 with respect to x.

        t1 is the gradient of sum(sin(t0)), t2 is the gradient of sum(sin(t1)), and t3 is the gradient of sum(sin(t2)).
        """
        found = [(y**4).sum()]
        for _ in range(3):
            found += [torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)[0]]
        return found

    ours = orders(qkv, torch.cat(rotate_qkv(qkv, HEADS, cos, sin), dim=1) / 8)
    exact = orders(exact_qkv, rotated(exact_qkv, cos, sin, 6) / 8)
    for found, expected in zip(ours, exact, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_qkv_is_one_buffer(device):
    """q, k and v share one buffer, so autograd keeps only one tensor, and activation offload copies only one tensor."""
    qkv, cos, sin = draw(device)
    q, k, v = rotate_qkv(qkv, HEADS, cos, sin)
    assert all(x.untyped_storage().data_ptr() == q.data_ptr() != qkv.data_ptr() for x in (q, k, v))
    assert q.untyped_storage().nbytes() == qkv.numel() * qkv.element_size()
    assert [x.storage_offset() for x in (q, k, v)] == [0, 4 * DIM, 6 * DIM]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_activation_checkpointing_does_not_change_qkv(reentrant, device):
    qkv, cos, sin = draw(device)

    def layer(qkv):
        q, k, v = rotate_qkv(qkv, HEADS, cos, sin)
        return q.exp().sum() + k.exp().sum() + v.exp().sum()

    (expected,) = torch.autograd.grad(layer(qkv), qkv)
    checkpoint(layer, qkv, use_reentrant=reentrant).backward()
    assert torch.equal(qkv.grad, expected)


def test_qkv_keeps_angles_alone(device):
    """The backward pass uses the tensors that saved-tensor hooks return."""
    qkv, cos, sin = draw(device)
    kept = []

    def pack(x):
        kept.append(x.shape)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: -x):
        q, k, v = rotate_qkv(qkv, HEADS, cos, sin)
    gradients = [torch.randn(x.shape, device=device) for x in (q, k, v)]
    (d_qkv,) = torch.autograd.grad((q, k, v), qkv, gradients)
    assert kept == [cos.shape, sin.shape]
    # The hook negates cos and sin. The backward pass negates sin again, to rotate by the opposite angle.
    exact = rotated(torch.cat(gradients, dim=1), -cos, sin, 6)
    torch.testing.assert_close(d_qkv.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_attention_joins_gradients_by_the_rotation(dynamic, device):
    """The rotation kernel writes dq, dk and dv into one tensor. torch.cat would copy them once more."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(Counter(node.target for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def attend(q, k, v, schedule):
        return q * (k.exp() * v).repeat_interleave(2, dim=1)

    config = ModelConfig(
        vocab_size=8, n_layers=1, dim=8, n_heads=HEADS[0], n_kv_heads=HEADS[1], head_dim=DIM, ffn_dim=8, norm="rmsnorm",
        norm_eps=1e-5, positions="rope", rope_theta=10000.0, max_seq_len=None, activation="swiglu", bias=True,
        qk_norm=False, tied=True, init="gpt2",
    )  # fmt: skip
    layer = SelfAttention(config, attend, rotates=True, checkpointed=False).to(device)
    x, table = torch.randn(9, 8, device=device, requires_grad=True), RotaryTable(*angles(9, DIM // 2, device))
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    inputs = (x, *layer.parameters())
    ours, expected = (torch.autograd.grad(run(x, None, table).square().sum(), inputs) for run in (compiled, layer))
    for found, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, eager)
    assert len(graphs) == 2
    for graph in graphs:
        assert graph[torch.ops.rotary.rotate.default] == 1 and not graph[torch.ops.aten.cat.default]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [[3], [2, 1, 1]], ids=["one-part", "three-parts"])
def test_the_operator_passes_opcheck(heads, device):
    parts = [torch.randn(5, n_heads, 8, device=device, requires_grad=True) for n_heads in heads]
    torch.library.opcheck(rotary._rotate, (parts, *angles(5, 4, device), 2, torch.float32, False))


def test_tensors_may_be_empty(device):
    assert rotate_heads(torch.zeros(0, 2, 8, device=device), *angles(0, 4, device), 2).shape == (0, 2, 8)
    qkv, cos, sin = draw(device, total=0)
    rotated = rotate_qkv(qkv, HEADS, cos, sin)
    assert [x.shape for x in rotated] == [(0, n_heads, DIM) for n_heads in HEADS]
    assert torch.autograd.grad(rotated, qkv, rotated)[0].shape == qkv.shape


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


@pytest.mark.parametrize(
    ("shape", "table", "heads", "message"),
    [
        pytest.param((4, 4, 8), (4, 8), [2, 1, 1], r"cos and sin must be .* got \(4, 8\)", id="width"),
        pytest.param((4, 4, 7), (4, 3), [2, 1, 1], "even head_dim", id="odd"),
        pytest.param((4, 4, 8), (4, 4), [2, 1, 2], r"add up to the 4 heads of qkv; got \(2, 1, 2\)", id="sum"),
        pytest.param((4, 4, 8), (4, 4), [2, 2], r"got \(2, 2\)", id="two"),
    ],
)
def test_mistakes_of_qkv_are_named(shape, table, heads, message):
    with pytest.raises(ValueError, match=message):
        rotate_qkv(torch.zeros(shape), heads, torch.zeros(table), torch.zeros(table))
