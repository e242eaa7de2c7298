"""Compares the chunked FFN of layers with adapters or 4-bit weights with an FFN that processes all tokens at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_train.memory import tiled_ffn
from fa_train.memory.tiled_ffn import LinearTensors, activate, mlp_backward, mlp_forward, tiled_mlp
from fa_train.models.ffn import choose_ffn
from fa_train.models.nf4 import NF4_PARTS, nf4_weight, quantized
from tests.memory.support.small import LargestTensor, levers
from tests.support.tolerance import assert_as_accurate

TOTAL, DIM, FFN_DIM, RANK = 50, 16, 32, 3
ACTIVATIONS = pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
OF_ADAPTERS = [name in ("a", "b") for name in LinearTensors._fields]
NAMES = ("y", "dx", "up_a", "up_b", "down_a", "down_b")


def layer(rows: int, columns: int, adapted: bool, bias: bool, in_4_bits: bool, device: torch.device) -> LinearTensors:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    weight, biases = normal(rows, columns) / columns**0.5, normal(rows) if bias else None
    adapters = (normal(RANK, columns) / 4, normal(rows, RANK) / 4) if adapted else (None, None)
    if not in_4_bits:
        return LinearTensors(weight, biases, *adapters)
    codes, parts = quantized(weight, "up")
    return LinearTensors(codes, biases, *adapters, *(parts[name] for name in NF4_PARTS))


def draw(
    activation: str, adapted: str, device: torch.device, *, bias: bool = False, in_4_bits: bool = False
) -> tuple[Tensor, LinearTensors, LinearTensors]:
    """adapted: which layers have an adapter."""
    rows = FFN_DIM if activation == "gelu" else 2 * FFN_DIM
    up = layer(rows, DIM, "up" in adapted, bias, in_4_bits, device)
    down = layer(DIM, FFN_DIM, "down" in adapted, bias, in_4_bits, device)
    return torch.randn(TOTAL, DIM, device=device), up, down


def at_once(x: Tensor, up: LinearTensors, down: LinearTensors, activation: str, *_: int) -> Tensor:
    def linear(x: Tensor, layer: Any, rows: int) -> Tensor:
        weight = layer.weight
        if layer.nf4 is not None:
            weight = nf4_weight([weight, *layer[4:]], rows, x.shape[-1], torch.float32)
        y = F.linear(x, weight, layer.bias)
        return y if layer.a is None else y + (x @ layer.a.T) @ layer.b.T

    ffn_dim = FFN_DIM if activation == "gelu" else 2 * FFN_DIM
    return linear(activate(linear(x, up, ffn_dim), activation), down, DIM)


def run(function, x: Any, up: LinearTensors, down: LinearTensors, *arguments: str | int) -> dict[str, Tensor]:
    x, *adapters = (t if t is None else t.detach().requires_grad_() for t in (x, up.a, up.b, down.a, down.b))
    up, down = up._replace(a=adapters[0], b=adapters[1]), down._replace(a=adapters[2], b=adapters[3])
    y = function(x, up, down, *arguments)
    wanted = {name: t for name, t in zip(NAMES[1:], (x, *adapters), strict=True) if t is not None}
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))


@ACTIVATIONS
@pytest.mark.parametrize("chunk_size", [1, 7, 25, 4096])
@pytest.mark.parametrize("adapted", ["up and down", "up", "down", "neither"])
@pytest.mark.parametrize(("bias", "in_4_bits"), [(False, False), (True, False), (True, True)])
def test_equals_at_once(chunk_size, activation, adapted, bias, in_4_bits, device):
    if in_4_bits:
        pytest.importorskip("torchao")
    drawn = draw(activation, adapted, device, bias=bias, in_4_bits=in_4_bits)
    ours, expected = run(tiled_mlp, *drawn, activation, chunk_size), run(at_once, *drawn, activation)
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("bf16_matmul")
@ACTIVATIONS
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16-weights"])
def test_bf16_is_as_accurate_as_at_once(autocast, activation, device):
    """All tensors have one dtype here. In a real run with bf16 weights, LoRA's fp32 matrices A and B are first rounded
    to bf16.
    """
    drawn = draw(activation, "up and down", device, bias=True)

    def result(function, dtype: torch.dtype) -> dict[str, Tensor]:
        x, *layers = drawn
        tensors: list[Any] = [[t if t is None else t.to(dtype) for t in layer] for layer in layers]
        up, down = (LinearTensors(*layer) for layer in tensors)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast and dtype == torch.float32):
            return run(function, x.to(dtype), up, down, activation, 16)

    dtype = torch.float32 if autocast else torch.bfloat16
    ours, baseline = result(tiled_mlp, dtype), result(at_once, dtype)
    exact = result(at_once, torch.float64)
    for name in ours:
        assert ours[name].dtype == baseline[name].dtype, name
        assert_as_accurate(name, ours[name], exact[name], baseline[name])


@ACTIVATIONS
def test_activations_never_exist_at_once(activation, device):
    x, up, down = draw(activation, "up and down", device)
    x = x.repeat(20, 1)
    with LargestTensor() as largest:
        # call the Python bodies of the operators, because a dispatch mode does not see inside an operator
        mlp_forward._init_fn(x, up, down, activation, 16, False)
        mlp_backward._init_fn(x, x, up, down, None, activation, 16, OF_ADAPTERS * 2)
    assert largest.elements == x.numel()  # without chunks, the activations would have twice as many elements


@pytest.mark.parametrize("trained", ["up.weight", "up.bias", "down.weight", "down.bias"])
def test_a_weight_may_be_trained_together_with_adapters(trained, device):
    x, up, down = draw("swiglu", "up and down", device, bias=True)
    name, field = trained.split(".")
    weight, gradients = getattr({"up": up, "down": down}[name], field).requires_grad_(), []
    for function in (tiled_mlp, at_once):
        function(x, up, down, "swiglu", 16).sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_wrong_shapes_and_layers_are_named(device):
    x, up, down = draw("swiglu", "up", device)
    with pytest.raises(ValueError, match=r"must be \(total, dim\), .*; got \(1, 50, 16\), \(64, 16\) and"):
        tiled_mlp(x[None], up, down, "swiglu", 16)

    class Own(nn.Linear):
        pass

    with pytest.raises(ValueError, match=r"needs layers of class nn.Linear or LoRALinear in the FFN; got Own"):
        choose_ffn(Own(8, 32), nn.Linear(16, 8), "swiglu", levers(mlp_chunk=4))


def test_no_gradient_of_a_frozen_adapter_is_computed(device, monkeypatch):
    monkeypatch.setattr(tiled_ffn, "add_product", None)
    drawn = draw("swiglu", "neither", device)
    assert run(tiled_mlp, *drawn, "swiglu", 16).keys() == {"y", "dx"}


@ACTIVATIONS
@pytest.mark.parametrize("adapted", ["up and down", "down"])
def test_operators_keep_torchs_rules(activation, adapted, device):
    x, up, down = draw(activation, adapted, device, bias=True)
    checks, layers = ("test_schema", "test_faketensor"), (list(up), list(down))
    needs = [t is not None and of_adapter for layer in layers for t, of_adapter in zip(layer, OF_ADAPTERS, strict=True)]
    x = x.T.contiguous().T  # the results must be contiguous even if x is not
    torch.library.opcheck(mlp_forward, (x, *layers, activation, 16, False), test_utils=checks)
    torch.library.opcheck(mlp_backward, (x, x, *layers, None, activation, 16, needs), test_utils=checks)
