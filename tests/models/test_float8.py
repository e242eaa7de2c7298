"""Tests float8 training. On the CPU, operands are rounded to float8 and multiplied in fp32."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from fa_train import training
from fa_train.lit_gpt import LitGPT
from fa_train.models.float8 import require_float8_gpu, use_float8
from fa_train.models.gpt import GPT
from tests.memory.support.small import assert_equal, compile_blocks, levers, small_gpt, step, stream
from tests.models.support.adapters import lora
from tests.support.marks import slow_except
from tests.support.training import column, composed, tiny

pytest.importorskip("torchao")
CPU = torch.device("cpu")
LENGTHS = [9, 1, 0, 22]  # 32 tokens
BLOCK = {"attention.qkv", "attention.out", "ffn.up", "ffn.down"}
MEMORIES = [
    pytest.param(levers(), id="none"),
    pytest.param(levers("selective"), id="selective"),
    pytest.param(levers("full", offload=True), id="full-offload"),
]


@pytest.fixture(autouse=True)
def _forget_compiled():
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def emulated(model: GPT) -> GPT:
    use_float8(model, "tensorwise", emulate=True)
    return model


def converted(model: GPT) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to float8 with one scale, which maps the largest magnitude in x to the largest number of `dtype`."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def test_the_linear_layers_of_all_blocks_are_converted_and_no_others():
    model = emulated(small_gpt(levers(), CPU, n_layers=2))
    assert converted(model) == {f"blocks.{i}.{name}" for i in range(2) for name in BLOCK}


@pytest.mark.parametrize("bias", [False, True])
def test_products_and_gradients_of_a_layer_are_those_of_rounded_operands(bias):
    layer = emulated(small_gpt(levers(), CPU, n_layers=1, bias=bias)).blocks[0].attention.qkv
    x, dy = torch.randn(32, layer.in_features, requires_grad=True), torch.randn(32, layer.out_features)
    y = layer(x)
    y.backward(dy)
    e4m3, e5m2 = partial(rounded, dtype=torch.float8_e4m3fn), partial(rounded, dtype=torch.float8_e5m2)
    with torch.no_grad():
        expected = e4m3(x) @ e4m3(layer.weight).T + (layer.bias if bias else 0)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, e5m2(dy) @ e4m3(layer.weight))
        torch.testing.assert_close(layer.weight.grad, e5m2(dy).T @ e4m3(x))
    assert not torch.allclose(y, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4)  # it did round


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
def test_gradients_are_close_to_those_without_float8(activation):
    batch = stream(CPU, LENGTHS)
    expected = step(small_gpt(levers(), CPU, activation=activation), batch)
    found = step(emulated(small_gpt(levers(), CPU, activation=activation)), batch)
    for ours, theirs in zip(found, expected, strict=True):
        # e5m2 has 2 bits of mantissa, so each rounding changes an element by at most 1/8 of its magnitude. A gradient
        # is rounded in several layers.
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 0.25
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_compiled_blocks_compute_the_same_in_one_graph(memory):
    batch = stream(CPU, LENGTHS)
    expected = step(emulated(small_gpt(levers(), CPU)), batch)
    assert_equal(step(compile_blocks(emulated(small_gpt(memory, CPU))), batch), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "again"), [("selective", set()), ("full", {(32, 64), (80, 32), (32, 160)})])
def test_selective_checkpointing_keeps_the_scales_of_weights(checkpointing, again):
    """With selective checkpointing, the backward graph does not recompute the scales of weights.

    An exception is the scale of the last layer's weight with torch 2.14 and newer.
    """
    largest: list[tuple[int, ...]] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        maxima = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.max.default)
        largest.extend(tuple(node.args[0].meta["val"].shape) for node in maxima)
        return make_boxed_func(graph.forward)

    def ignore(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=ignore, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    model = emulated(small_gpt(levers(checkpointing), CPU, n_layers=1, ffn_dim=80))
    model.compile_blocks(backend=backend)
    model(**stream(CPU, [9, 1, 0, 38])).backward()
    of_weights = {shape for shape in largest if shape[0] != 48}  # the stream has 48 tokens
    if checkpointing == "selective":
        of_weights -= {(80, 32)}
    assert largest and of_weights - {(32, 32)} == again


def test_weights_keep_their_names_and_load_both_ways():
    plain, ours = small_gpt(levers(), CPU), emulated(small_gpt(levers(), CPU))
    assert list(ours.state_dict()) == list(plain.state_dict())
    for there, back in ((ours, plain), (plain, ours)):
        with torch.no_grad():
            for parameter in there.parameters():
                parameter.normal_()
        back.load_state_dict(there.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(there.parameters(), back.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in ours.parameters())


def test_bf16_weights_stay_bf16():
    model = emulated(small_gpt(levers(), CPU, n_layers=1)).bfloat16()
    model.blocks[0].attention.qkv(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    gradient = model.blocks[0].attention.qkv.weight.grad
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


def test_the_lightning_module_converts_before_it_compiles():
    model = small_gpt(levers(), CPU, n_layers=1)
    LitGPT(model, SGD, LambdaLR, compile_model=True, seed=0, float8="tensorwise")
    assert converted(model) == {f"blocks.0.{name}" for name in BLOCK}
    assert type(model.blocks[0].ffn).__name__ == "DenseFFN" and model.adds_later
    other = small_gpt(levers(), CPU, n_layers=1)
    LitGPT(other, SGD, LambdaLR, compile_model=True, seed=0)
    assert not converted(other)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(partial(small_gpt, levers(mlp_chunk=16), CPU), "needs memory.mlp_chunk=null; got 16", id="chunks"),
        pytest.param(
            partial(small_gpt, levers(offload="all"), CPU), "needs memory.offload=false or true; got all", id="all"
        ),
        pytest.param(
            partial(small_gpt, levers(), CPU, ffn_dim=40),
            "multiples of 16; block 0: ffn.up has 32 inputs and 80 outputs|"
            "multiples of 16; block 0: ffn.down has 40 inputs and 32 outputs",
            id="sizes",
        ),
        pytest.param(lambda: lora()(small_gpt(levers(), CPU)), "needs adapter=none; got LoRA adapters", id="lora"),
    ],
)
def test_a_model_without_support_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        use_float8(model(), "tensorwise", emulate=True)


FLOAT8 = ("lit_gpt.float8=tensorwise", "lit_gpt.compile_model=true", "trainer.precision=bf16-true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    slow_except(
        ["cpu", "chunks"],
        [
            pytest.param([], "needs a CUDA GPU; got trainer.accelerator=cpu", id="cpu"),
            pytest.param(["lit_gpt.compile_model=false"], "needs lit_gpt.compile_model=true; got false", id="eager"),
            pytest.param(
                ["trainer.precision=32-true"], "trainer.precision=bf16-mixed or bf16-true; got 32-true", id="fp32"
            ),
            pytest.param(["adapter=lora"], "needs adapter=none; got LoRA adapters", id="lora"),
            pytest.param(["adapter=qlora"], "needs adapter=none; got LoRA adapters", id="qlora"),
            pytest.param(["memory=offload"], "needs memory.mlp_chunk=null; got 16384", id="chunks"),
            pytest.param(["seq_len=72"], "seq_len . data.micro_batch_size to be a multiple of 16; got 72", id="tokens"),
            pytest.param(["strategy=fsdp", "trainer.devices=2"], "needs strategy=auto or ddp; got fsdp", id="fsdp"),
        ],
    ),
)
def test_a_run_without_support_is_refused_before_it_starts(overrides, message, tmp_path):
    with (
        composed(tmp_path, *tiny(tmp_path, *FLOAT8, *overrides)) as cfg,
        pytest.raises(ValueError, match=rf"lit_gpt\.float8 .*{message}"),
    ):
        training.build(cfg)


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"a GPU of compute capability 8\.9 or higher; NVIDIA A100 has 8\.0"):
        require_float8_gpu(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    require_float8_gpu(torch.device("cuda"))


def test_a_missing_torchao_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"lit_gpt\.float8 needs torchao=="):
        use_float8(small_gpt(levers(), CPU), "tensorwise")


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_matmul")
def test_a_run_trains_and_its_checkpoint_continues_without_float8(tmp_path, monkeypatch):
    compile_blocks = GPT.compile_blocks
    monkeypatch.setattr(training, "require_float8_gpu", lambda device: None)
    monkeypatch.setattr("fa_train.lit_gpt.use_float8", partial(use_float8, emulate=True))
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    common = ("callbacks.checkpoint.every_n_train_steps=8", "trainer.val_check_interval=4")

    def run(name: str, *overrides: str) -> dict[int, float]:
        (folder := tmp_path / name).mkdir()
        with composed(folder, *tiny(tmp_path, *FLOAT8, *common, *overrides)) as cfg:
            training.train(cfg)
        return column(folder, "train/loss")

    first = run("first", "max_steps=8")
    plain = run("plain", "max_steps=8", "lit_gpt.float8=null")
    assert first[8] < first[1] and first != plain
    assert first == pytest.approx(plain, rel=0.05)
    [checkpoint] = (tmp_path / "first").rglob("*.ckpt")
    resumed = run("resumed", "max_steps=12", "lit_gpt.float8=null", f"ckpt_path={checkpoint}")
    assert sorted(resumed) == [9, 10, 11, 12] and resumed[12] < first[1]
