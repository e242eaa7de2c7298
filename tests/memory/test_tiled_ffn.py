"""Compares the chunked FFN with an FFN that processes all tokens at once."""

from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_train.memory import tiled_ffn
from fa_train.memory.tiled_ffn import FIELDS, LinearTensors, activate, activation_backward, mlp_backward, mlp_forward
from tests.memory.support.small import LargestTensor, compile_blocks, levers, small_gpt, step, stream
from tests.support.marks import slow
from tests.support.tolerance import assert_as_accurate

TOTAL, DIM, FFN_DIM = 50, 16, 24
NAMES = ("y", "dx", "d_up", "d_up_bias", "d_down", "d_down_bias")
KINDS = pytest.mark.parametrize(
    ("activation", "bias"),
    [
        pytest.param("swiglu", False, id="swiglu"),
        pytest.param("swiglu", True, id="swiglu-bias"),
        pytest.param("gelu", False, id="gelu"),
        pytest.param("gelu", True, id="gelu-bias"),
        pytest.param("geglu", False, id="geglu"),
        pytest.param("geglu", True, id="geglu-bias"),
    ],
)
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, str]


def draw(activation: str, bias: bool, device: torch.device) -> tuple[Arguments, Tensor]:
    """Returns all arguments of the FFN except the chunk size, and the gradient of the output."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).requires_grad_()

    rows = FFN_DIM if activation == "gelu" else 2 * FFN_DIM
    x, up, down = normal(TOTAL, DIM), normal(rows, DIM), normal(DIM, FFN_DIM)
    biases = (normal(rows), normal(DIM)) if bias else (None, None)
    return (x, up, biases[0], down, biases[1], activation), torch.randn(TOTAL, DIM, device=device)


def tiled_mlp(x, up, up_bias, down, down_bias, *arguments) -> Tensor:
    return tiled_ffn.tiled_mlp(x, LinearTensors(up, up_bias), LinearTensors(down, down_bias), *arguments)


def at_once(x, up, up_bias, down, down_bias, activation) -> Tensor:
    return F.linear(activate(F.linear(x, up, up_bias), activation), down, down_bias)


def run(function, arguments: tuple, dy: Tensor, *chunks: int | bool) -> dict[str, Tensor]:
    """chunks: the arguments chunk_size and keep of tiled_mlp."""
    y = function(*arguments, *chunks)
    wanted = {name: x for name, x in zip(NAMES[1:], arguments, strict=False) if isinstance(x, Tensor)}
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))


@KINDS
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("chunk_size", [1, 7, 25, 50, 4096])
def test_equals_at_once(chunk_size, keep, activation, bias, device):
    arguments, dy = draw(activation, bias, device)
    ours, expected = run(tiled_mlp, arguments, dy, chunk_size, keep), run(at_once, arguments, dy)
    assert ours.keys() == expected.keys()
    # On a GPU, a fused kernel computes GeGLU. On an H200, gradients differed from torch's by up to 2.4e-4.
    tolerance = 1e-3 if device.type == "cuda" and activation == "geglu" else 1e-4
    for name in ours:
        torch.testing.assert_close(
            ours[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@KINDS
def test_one_chunk_is_the_same_to_the_bit(activation, bias, device):
    """Gradients of biases are not compared, because the chunked FFN sums them in a different order.

    On a GPU, SwiGLU and GeGLU have a tolerance, because the kernel's last bits differ from torch's.
    """
    arguments, dy = draw(activation, bias, device)
    ours, expected = run(tiled_mlp, arguments, dy, TOTAL), run(at_once, arguments, dy)
    tolerance = {"swiglu": 1e-5, "geglu": 1e-4, "gelu": 0.0}[activation] if device.type == "cuda" else 0.0
    for name in ("y", "dx", "d_up", "d_down"):
        torch.testing.assert_close(ours[name], expected[name], rtol=tolerance, atol=10 * tolerance)


@pytest.mark.usefixtures("bf16_matmul")
@KINDS
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16-weights"])
def test_bf16_is_as_accurate_as_at_once(autocast, keep, activation, bias, device):
    drawn, dy = draw(activation, bias, device)

    def result(function, dtype, *chunks) -> dict[str, Tensor]:
        arguments = tuple(x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) else x for x in drawn)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast and dtype == torch.float32):
            gradient = dy.to(torch.float64 if dtype == torch.float64 else torch.bfloat16)
            return run(function, arguments, gradient, *chunks)

    dtype = torch.float32 if autocast else torch.bfloat16
    ours, baseline = result(tiled_mlp, dtype, 16, keep), result(at_once, dtype)
    exact = result(at_once, torch.float64)
    for name in ours:
        assert ours[name].dtype == baseline[name].dtype, name
        assert_as_accurate(name, ours[name], exact[name], baseline[name])


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
def test_activations_never_exist_at_once(activation, device):
    rows = 64 if activation == "gelu" else 128
    x, dy = torch.randn(512, 4, device=device), torch.randn(512, 4, device=device)
    up, down = torch.randn(rows, 4, device=device), torch.randn(4, 64, device=device)
    layers, needs = (LinearTensors(up, None), LinearTensors(down, None)), [True, *[False] * (FIELDS - 1)]
    with LargestTensor() as largest:
        # call the Python bodies of the operators, because a dispatch mode does not see inside an operator
        mlp_forward._init_fn(x, *layers, activation, 16, False)
        mlp_backward._init_fn(dy, x, *layers, None, activation, 16, [*needs, *needs])
    assert largest.elements == 512 * 4  # without chunks, the activations would have at least 512 x 64 elements
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s.shape) or s, lambda s: s):
        tiled_mlp(x.requires_grad_(), up.requires_grad_(), None, down, None, activation, 16)
    assert saved == [(512, 4), (rows, 4), (4, 64)]


def test_nothing_is_kept_without_gradients(device):
    arguments, _ = draw("swiglu", False, device)
    with torch.no_grad(), LargestTensor() as largest:
        tiled_mlp(*arguments, 5, True)
    assert largest.elements < TOTAL * 2 * FFN_DIM


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_gradients_may_have_any_layout(layout, device):
    arguments, dy = draw("swiglu", False, device)
    dy = torch.ones(1, 1, device=device).expand(TOTAL, DIM) if layout == "expanded" else dy.T.contiguous().T
    ours, expected = run(tiled_mlp, arguments, dy, 7), run(at_once, arguments, dy)
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_passes_overwrite_what_they_read(activation, device, monkeypatch):
    """The backward writes results into the two tensors that it allocates per chunk: `projected` and one gradient."""
    places = []

    def spy(projected: Tensor, d_activated: Tensor, activation: str, *, in_place: bool) -> tuple[Tensor, Tensor]:
        before = {projected.data_ptr(), d_activated.data_ptr()}
        results = activation_backward(projected, d_activated, activation, in_place=in_place)
        places.append(before == {x.data_ptr() for x in results})
        return results

    monkeypatch.setattr(tiled_ffn, "activation_backward", spy)
    arguments, dy = draw(activation, False, device)
    run(tiled_mlp, arguments, dy, 25)
    assert places == [True, True]


def test_gradients_of_biases_are_computed_after_the_activations_are_freed(device, monkeypatch):
    """On a GPU, the sum of a bias's gradient needs memory."""
    activations, freed = [], []
    backward, add = tiled_ffn.activation_backward, tiled_ffn._add_bias_gradient

    def remember(*arguments, **options):
        activated, d_projected = backward(*arguments, **options)
        activations.append(ref(activated))
        return activated, d_projected

    monkeypatch.setattr(tiled_ffn, "activation_backward", remember)
    monkeypatch.setattr(tiled_ffn, "_add_bias_gradient", lambda *x: freed.append(activations[-1]() is None) or add(*x))
    arguments, dy = draw("gelu", True, device)
    run(tiled_mlp, arguments, dy, 25)
    assert freed == [True] * 4


def test_frozen_weights_cost_no_products(device, monkeypatch):
    arguments, dy = draw("swiglu", True, device)
    expected = run(tiled_mlp, arguments, dy, 16)
    for x in arguments[1:5]:
        x.requires_grad_(False)
    monkeypatch.setattr(tiled_ffn, "add_product", None)
    tiled_mlp(*arguments, 16).backward(dy)
    assert torch.equal(arguments[0].grad, expected["dx"])
    assert all(x.grad is None for x in arguments[1:5])


def test_one_weight_may_be_frozen(device):
    arguments, dy = draw("gelu", False, device)
    expected = run(tiled_mlp, arguments, dy, 16)
    arguments[1].requires_grad_(False)
    tiled_mlp(*arguments, 16).backward(dy)
    assert arguments[1].grad is None and torch.equal(arguments[3].grad, expected["d_down"])


def test_the_input_may_be_frozen(device):
    arguments, dy = draw("gelu", False, device)
    expected = run(tiled_mlp, arguments, dy, 16)
    arguments[0].requires_grad_(False)
    tiled_mlp(*arguments, 16).backward(dy)
    assert torch.equal(arguments[1].grad, expected["d_up"])


@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_checkpointing_does_not_repeat_the_forward(checkpointing, compiled, device, monkeypatch):
    """Checkpointing recomputes only the operations before the FFN."""
    calls = []
    for name in ("activate_outside_autograd", "activation_backward"):
        function = getattr(tiled_ffn, name)
        monkeypatch.setattr(tiled_ffn, name, lambda *args, f=function, n=name, **kw: calls.append(n) or f(*args, **kw))
    model = small_gpt(levers(checkpointing, mlp_chunk=8), device, n_layers=2)
    if compiled:
        compile_blocks(model)
    step(model, stream(device))
    chunks = 2 * 24 // 8  # 2 layers, and 24 tokens in chunks of 8 tokens
    assert calls == ["activate_outside_autograd"] * chunks + ["activation_backward"] * chunks


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_do_not_change_a_model(activation, bias, device):
    model = {}
    for chunk in (None, 24, 5):
        memory = levers(mlp_chunk=chunk)
        model[chunk] = step(small_gpt(memory, device, activation=activation, bias=bias), stream(device))
    for chunk in (24, 5):
        for ours, theirs in zip(model[chunk], model[None], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@KINDS
def test_operators_keep_torchs_rules(activation, bias, device):
    arguments, dy = draw(activation, bias, device)
    x, up, up_bias, down, down_bias = (t if t is None else t.detach() for t in arguments[:5])
    x = x.T.contiguous().T  # the results must be contiguous even if x is not
    layers = [list(LinearTensors(up, up_bias)), list(LinearTensors(down, down_bias))]
    checks = ("test_schema", "test_faketensor")
    for keep in (True, False):
        torch.library.opcheck(mlp_forward, (x, *layers, activation, 16, keep), test_utils=checks)
        projected = mlp_forward(x, *layers, activation, 16, True)[1] if keep else None
        for needs in ([t is not None for layer in layers for t in layer], [False] * 2 * FIELDS):
            torch.library.opcheck(mlp_backward, (dy, x, *layers, projected, activation, 16, needs), test_utils=checks)


def test_wrong_shapes_and_sizes_are_named(device):
    arguments, _ = draw("swiglu", False, device)
    x, up, _, down, *_ = arguments
    with pytest.raises(ValueError, match=r"for gelu; got \(50, 16\), \(48, 16\) and \(16, 24\)"):
        tiled_mlp(x, up, None, down, None, "gelu", 16)
    with pytest.raises(ValueError, match=r"for swiglu; got \(50, 15\), \(48, 16\) and \(16, 24\)"):
        tiled_mlp(x[:, 1:], up, None, down, None, "swiglu", 16)
    with pytest.raises(ValueError, match=r"memory.mlp_chunk must be at least 1 token or null; got 0"):
        levers(mlp_chunk=0)
