"""Tests QLoRA: the frozen weights have 4 bits, quantized by torchao."""

import sys

import pytest
import torch
from torch import Tensor

from fa_train import training
from fa_train.models import nf4
from fa_train.models.gpt import GPT
from fa_train.models.lora import LoRALinear, adapted, adapter_tensors, adapters_of, merge
from fa_train.models.nf4 import quantized
from tests.memory.support.small import compile_blocks, levers, small_gpt, step, stream
from tests.models.support.adapters import COMPILED_CHUNKS, MEMORIES, SELECTIVE, lora, small
from tests.support.training import composed, tiny

pytest.importorskip("torchao")
pytestmark = pytest.mark.usefixtures("bf16_matmul")
CPU = torch.device("cpu")
QLORA = lora(quantization="nf4")
# 16 quantiles of a normal distribution, rounded (QLoRA, arXiv:2305.14314, appendix E)
NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379,
                    0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip


def rounded_to_nf4(weight: Tensor) -> Tensor:
    """Rounds each element to the nearest of NF4's 16 levels.

    For each block of 64 elements, the levels are multiplied by the block's largest magnitude, which is not rounded.
    """
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    return (NF4[(blocks[..., None] / scales[..., None] - NF4).abs().argmin(-1)] * scales).reshape(weight.shape)


def dense() -> GPT:
    """Builds an fp32 model with weights rounded to NF4, and with the adapters of the QLoRA model."""
    model, plain = small(settings=QLORA), small()
    with torch.no_grad():
        for path, linear in adapted(model):
            plain.get_parameter(f"{path}.weight").copy_(linear.dense_weight())
    return plain


def test_weights_are_the_nearest_of_sixteen():
    exact, model = small_gpt(levers(), CPU), QLORA(small_gpt(levers(), CPU))
    linears = dict(adapted(model))
    assert len(linears) == 3 * 4
    for path, linear in linears.items():
        weight = exact.get_submodule(path).weight
        # Each scale is stored in 8 bits. The error of a stored scale is at most d / 256, where d is the largest
        # difference between a scale and the mean of all scales.
        torch.testing.assert_close(linear.dense_weight(), rounded_to_nf4(weight), rtol=0.01, atol=2e-4)
        stored = [linear.weight, *linear.nf4.values()]
        assert not any(p.requires_grad for p in stored)
        assert linear.weight.dtype == torch.uint8 and linear.weight.numel() == weight.numel() / 2
        assert sum(p.nbytes for p in stored) < 0.5 * weight.numel() + 0.1 * weight.numel() + 100


def test_gradients_are_those_of_the_rounded_weights():
    for ours, theirs in zip(step(small(settings=QLORA), stream(CPU)), step(dense(), stream(CPU)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("memory", MEMORIES)
def test_memory_levers_change_nothing(memory):
    for a, b in zip(step(small(memory, QLORA), stream(CPU)), step(small(settings=QLORA), stream(CPU)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [SELECTIVE, COMPILED_CHUNKS[-1]])
def test_memory_levers_change_nothing_compiled(memory):
    """The backward recomputes the dense weights, either for the whole FFN or for its chunks."""
    found = step(compile_blocks(small(memory, QLORA)), stream(CPU))
    for a, b in zip(found, step(small(settings=QLORA), stream(CPU)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_nothing_dense_waits_for_the_backward():
    model, saved = small(settings=QLORA), []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**stream(CPU))
    shapes = {(linear.out_features, linear.in_features) for _, linear in adapted(model)}
    assert saved and not shapes & {tuple(shape) for shape in saved}


@pytest.mark.parametrize("module", ["up", "down"])
def test_the_kernel_computes_the_same_as_torchao(module, monkeypatch):
    """The kernel runs in Triton's interpreter."""
    linear = small(settings=QLORA).blocks[0].ffn.get_submodule(module)
    x = torch.randn(2, 3, linear.in_features)
    dy = torch.randn(2, 3, linear.out_features)

    def results() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = linear._base(leaf)
        return [linear.dense_weight(), y.detach(), *torch.autograd.grad(y, leaf, dy)]

    expected = results()
    monkeypatch.setattr(nf4, "_weight_by_torchao", nf4._weight_by_kernel)
    dense = expected[0]
    for found, wanted in zip(results(), expected, strict=True):
        assert torch.equal(found, wanted)
    torch.testing.assert_close(expected[1:], [x @ dense.T, dy @ dense])


def test_bf16_true_keeps_the_scales():
    exact, model = small(settings=QLORA), small(settings=QLORA).bfloat16()
    for (_, ours), (_, theirs) in zip(adapted(model), adapted(exact), strict=True):
        assert torch.equal(ours.dense_weight(), theirs.dense_weight())
    loss = model(**stream(CPU))
    torch.testing.assert_close(loss, exact(**stream(CPU)), rtol=0.02, atol=0)


def test_merging_writes_the_weights_out():
    model, expected = small(settings=QLORA), dense()(stream(CPU)["tokens"])
    merged = merge(model)
    assert not any(isinstance(module, LoRALinear) for module in merged.modules())
    torch.testing.assert_close(merged(stream(CPU)["tokens"]), expected, rtol=1e-4, atol=1e-6)


def test_layers_without_adapters_are_in_4_bits_too():
    model = lora(quantization="nf4", target_modules=["q_proj"])(small_gpt(levers(), CPU))
    assert sum(bool(linear.nf4) for _, linear in adapted(model)) == 12 and len(adapter_tensors(model)) == 6


def test_shapes_on_meta_are_the_real_ones():
    """The shapes on the meta device must equal the real shapes, because the planner and the export use them."""
    real = QLORA(small_gpt(levers(), CPU))
    with torch.device("meta"):
        on_meta = QLORA(small_gpt(levers(), torch.device("meta")))
    found = {name: (p.shape, p.dtype) for name, p in on_meta.named_parameters() if name != "head.weight"}
    assert found == {name: (p.shape, p.dtype) for name, p in real.named_parameters()}
    adapters = adapters_of(real)
    assert adapters == adapters_of(on_meta) and adapters is not None and adapters.quantized
    assert sum(adapters.sizes) == sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_matrices_that_do_not_fill_blocks_are_named():
    with pytest.raises(ValueError, match=r"multiple of 64 elements; blocks.0.*weight has 90"):
        quantized(torch.zeros(9, 10), "blocks.0.attention.qkv.weight")


def test_a_missing_torchao_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with (
        composed(tmp_path, *tiny(tmp_path, "adapter=qlora")) as cfg,
        pytest.raises(ValueError, match=r"adapter.quantization=nf4 needs torchao==0.18.0"),
    ):
        training.build(cfg)
