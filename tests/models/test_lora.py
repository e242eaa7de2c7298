"""Tests LoRA: which weights are trained, all memory levers, and adapter files in the format of peft."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from fa_train import training
from fa_train.memory import tiled_ffn
from fa_train.models.gpt import GPT, Head
from fa_train.models.hf import export
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LoRALinear,
    adapted,
    adapter_tensors,
    load_adapter,
    merge,
    save_adapter,
)
from fa_train.optim.adamw import adamw, adamw_bf16, adamw_master
from tests.memory.support.small import compile_blocks, levers, small_gpt, step, stream
from tests.models.hf.support.checkpoints import tokens, write_checkpoint, write_with_images
from tests.models.support.adapters import COMPILED_CHUNKS, MEMORIES, SELECTIVE, lora, randomised, small
from tests.support.marks import slow
from tests.support.training import column, composed, tiny

pytestmark = pytest.mark.usefixtures("bf16_matmul")
CPU = torch.device("cpu")
# An adapter's target is a whole matrix or a part of a joined matrix. The regular expression leaves layer 0 without an
# adapter.
TARGETS = [
    pytest.param("all-linear", id="all"),
    pytest.param(["q_proj", "v_proj", "up_proj"], id="parts"),
    pytest.param(r".*\.layers\.1\..*(k_proj|down_proj)", id="regex"),
]


def by_formula(folder: Path, name: str, base: Any) -> None:
    """Adds `scale * B @ A` from the adapter's files to the weights of a transformers model."""
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / name)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    for key, a in tensors.items():
        if ".lora_A." in key:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = scale * tensors[key.replace("lora_A", "lora_B")] @ a
            weight = base.get_parameter(f"{path}.weight").data
            weight += delta.T if config["fan_in_fan_out"] else delta


@pytest.mark.parametrize("targets", TARGETS)
def test_training_starts_from_the_model_and_changes_adapters_only(targets):
    plain, model = small_gpt(levers(), CPU), lora(target_modules=targets)(small_gpt(levers(), CPU))
    batch = stream(CPU)
    torch.testing.assert_close(model(batch["tokens"]), plain(batch["tokens"]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    optimizer = adamw(model, lr=0.01, weight_decay=0.1, betas=[0.9, 0.95], eps=1e-8, fused=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(optimizer.state) == len(trained)


def test_a_is_drawn_as_published():
    torch.manual_seed(0)
    model = lora(r=64)(small_gpt(levers(), CPU, dim=256, ffn_dim=512))
    for _, linear in adapted(model):
        bound = linear.in_features**-0.5  # the bound of Kaiming uniform initialisation with a = sqrt(5)
        for a, b in zip(linear.lora_A.values(), linear.lora_B.values(), strict=True):
            assert 0.99 * bound < a.abs().max() <= bound and abs(a.std() / bound - 3**-0.5) < 0.02
            assert not b.any() and a.dtype == b.dtype == torch.float32


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradients_are_those_of_the_merged_weights(activation, targets):
    """`dA = scale * B.T @ dW` and `dB = scale * dW @ A.T`, where dW is the gradient of the adapted rows of a weight."""
    settings = lora(target_modules=targets, use_rslora=True)
    model, dense = (small(settings=settings, activation=activation) for _ in range(2))
    linears = dict(adapted(model))
    merge(dense)
    step(model, stream(CPU))
    step(dense, stream(CPU))
    assert linears
    for path, linear in linears.items():
        d_weight = dense.get_submodule(path).weight.grad
        for part, rows in linear.rows.items():
            a, b, scale = linear.lora_A[part], linear.lora_B[part], 12 / 4**0.5
            torch.testing.assert_close(a.grad, scale * b.T @ d_weight[rows], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(b.grad, scale * d_weight[rows] @ a.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", *slow("gelu")])
@pytest.mark.parametrize("memory", MEMORIES)
def test_memory_levers_change_nothing(memory, activation):
    assert_like_none(small(memory, activation=activation), activation)


@pytest.fixture
def calls(monkeypatch):
    """A list that gets the name of each function that computes a chunk's activations or their gradient."""
    calls = []
    for name in ("activate_outside_autograd", "activation_backward"):
        function = getattr(tiled_ffn, name)
        count = partial(lambda f, n, *args, **kw: calls.append(n) or f(*args, **kw), function, name)
        monkeypatch.setattr(tiled_ffn, name, count)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("memory", [SELECTIVE, *COMPILED_CHUNKS])
def test_memory_levers_change_nothing_compiled(memory, calls):
    """One case with offloading (`all`) is enough, because offloading happens outside the compiled graphs.

    The loop over chunks must be inside an operator. An unrolled loop needs more memory.
    """
    assert_like_none(compile_blocks(small(memory)), "swiglu")
    chunks = 3 * 5 * (memory.mlp_chunk is not None)  # 3 layers, and 24 tokens in chunks of 5 tokens
    assert calls == ["activate_outside_autograd"] * chunks + ["activation_backward"] * chunks


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_each_chunk_is_computed_once_and_recomputed_once(checkpointing, calls):
    step(small(levers(checkpointing, mlp_chunk=8)), stream(CPU))
    chunks = 3 * 24 // 8  # 3 layers, and 24 tokens in chunks of 8 tokens
    assert calls == ["activate_outside_autograd"] * chunks + ["activation_backward"] * chunks


def assert_like_none(model: GPT, activation: str) -> None:
    expected, found = step(small(activation=activation), stream(CPU)), step(model, stream(CPU))
    assert len(expected) == 1 + len(adapter_tensors(model))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters_are_fp32_whatever_the_precision(precision):
    model = small().bfloat16() if precision == "bf16-true" else small()
    assert model.blocks[0].attention.qkv.weight.dtype == (torch.bfloat16 if "true" in precision else torch.float32)
    exact = adapter_tensors(small())
    for name, parameter in adapter_tensors(model).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, exact[name]), "the weight must not change"
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = model(**stream(CPU))
    loss.backward()
    torch.testing.assert_close(loss, small()(**stream(CPU)), rtol=0.02, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in adapter_tensors(model).values())


@pytest.mark.parametrize("name", ["gpt2", "qwen2", *slow("llama-biased-own-head", "qwen3", "gemma2", "arcee-gelu")])
def test_a_saved_adapter_is_the_formula(name, tmp_path):
    base = write_checkpoint(name, tmp_path / "base")
    settings = lora(use_rslora=name == "qwen2")
    model = randomised(settings(load_pretrained(tmp_path / "base", "naive")))
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    by_formula(tmp_path / "adapter", "adapter_model.safetensors", base)
    with torch.no_grad():
        expected = base(tokens()[None]).logits[0]
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)
        # a merged model has no LoRA layers, so it can be exported
        assert not any(isinstance(module, LoRALinear) for module in merge(model).modules())
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)
    save_pretrained(model, tmp_path / "merged")
    again = load_pretrained(tmp_path / "merged", "naive")
    torch.testing.assert_close(again(tokens()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", *slow("gpt2", "gemma2")])
def test_peft_and_we_read_each_others_adapters(name, tmp_path):
    peft = pytest.importorskip("peft")
    base = write_checkpoint(name, tmp_path / "base")
    model = randomised(lora(target_modules="all-linear")(load_pretrained(tmp_path / "base", "naive")))
    save_adapter(model, tmp_path / "ours", str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(tokens()[None]).logits[0]
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        # r and all other settings are read from the folder of the adapter, so r=1 has no effect
        again = lora(r=1, path=str(tmp_path / "theirs"))(load_pretrained(tmp_path / "base", "naive"))
        torch.testing.assert_close(again(tokens()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_a_model_with_images_adapts_its_language_model(targets, tmp_path, recwarn):
    peft = pytest.importorskip("peft")
    folder = write_with_images(tmp_path / "base")
    model = randomised(lora(target_modules=targets)(load_pretrained(folder, "naive")))
    save_adapter(model, tmp_path / "ours", str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert not [warning for warning in recwarn if "adapter keys" in str(warning.message)]
    with torch.no_grad():
        expected = theirs(tokens()[None]).logits[0]
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        again = lora(r=1, path=str(tmp_path / "theirs"))(load_pretrained(folder, "naive"))
        torch.testing.assert_close(again(tokens()), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_model_with_images_may_have_the_names_of_earlier_versions(tmp_path):
    folder = write_with_images(tmp_path / "base")
    model = randomised(lora()(load_pretrained(folder, "naive")))
    save_adapter(model, tmp_path / "ours", str(folder))
    weights, config = (tmp_path / "ours" / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG))
    save_file({name.replace("language_model.", ""): x for name, x in load_file(weights).items()}, weights)
    settings = json.loads(config.read_text())
    settings["target_modules"] = [name.replace("language_model.", "") for name in settings["target_modules"]]
    config.write_text(json.dumps(settings))
    again = lora(r=1, path=str(tmp_path / "ours"))(load_pretrained(folder, "naive"))
    with torch.no_grad():
        assert torch.equal(again(tokens()), model(tokens()))
    pattern = r"model\.layers\.\d+\.self_attn\.q_proj"
    assert len(list(adapted(lora(target_modules=pattern)(load_pretrained(folder, "naive"))))) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "with-images"])
def test_the_code_in_a_card_loads_an_adapter_with_its_rope(name, tmp_path):
    pytest.importorskip("peft")
    base = tmp_path / "base"
    if name == "with-images":
        write_with_images(base)
    else:
        write_checkpoint(name, base)
    model = load_pretrained(base, "naive", rope_scaling={"rope_type": "yarn"}, rope_theta=50.0, max_seq_len=128)
    model = randomised(lora()(model))
    config = {
        "model": {"pretrained": str(base)}, "seq_len": 128, "batch_size": 4, "seed": 0,
        "choices": {"data": "synthetic"}, "data": {},
    }  # fmt: skip
    export.write(model, 3, tmp_path / "adapter", "run", config, {}, adapter=True)
    card = (tmp_path / "adapter/README.md").read_text()
    assert "| RoPE | differs from the base model; load the adapter with the config below |" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    code = code.replace("path/to/base", str(base)).replace("path/to/this/folder", str(tmp_path / "adapter"))
    loaded: dict[str, Any] = {}
    exec(code, loaded)
    loaded["model"].set_attn_implementation("eager")  # other implementations have no soft cap
    with torch.no_grad():
        theirs = loaded["model"].eval()(tokens()[None]).logits[0]
        torch.testing.assert_close(model(tokens()), theirs, rtol=1e-4, atol=1e-5)


def test_an_adapter_goes_on_where_it_was_saved(tmp_path):
    write_checkpoint("llama", tmp_path / "base")
    first = randomised(lora(target_modules=["q_proj", "down_proj"])(load_pretrained(tmp_path / "base", "naive")))
    save_adapter(first, tmp_path / "adapter", None)
    again = lora(r=1, lora_alpha=1, path=str(tmp_path / "adapter"))(load_pretrained(tmp_path / "base", "naive"))
    assert torch.equal(again(tokens()), first(tokens()))
    assert all(p.requires_grad for p in adapter_tensors(again).values())
    with torch.device("meta"):  # the planner, too, builds a model on the meta device, without reading weights
        on_meta = lora(path=str(tmp_path / "adapter"))(load_pretrained(tmp_path / "base", "naive"))
    shapes = {name: p.shape for name, p in adapter_tensors(again).items()}
    assert {name: p.shape for name, p in adapter_tensors(on_meta).items()} == shapes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"r": 0}, "adapter.r must be an integer of at least 1; got 0", id="r"),
        pytest.param({"lora_alpha": -1}, "adapter.lora_alpha must be positive; got -1", id="alpha"),
        pytest.param({"lora_dropout": 1.0}, "adapter.lora_dropout must be at least 0 and less than 1", id="dropout"),
        pytest.param({"target_modules": []}, "adapter.target_modules must name at least one module", id="none"),
        pytest.param({"quantization": "int3"}, "adapter.quantization must be nf4 or null; got int3", id="bits"),
        pytest.param(
            {"target_modules": ["q_proj", "lm_head"]},
            "must be all-linear or name some of q_proj, .* got lm_head",
            id="target",
        ),
        pytest.param(
            {"target_modules": "nothing"}, "must be all-linear or name some of q_proj, .*; got nothing", id="regex"
        ),
        pytest.param(
            {"target_modules": "*_proj"},
            r"a list of names or a regular expression; got \*_proj: nothing to repeat",
            id="glob",
        ),
        pytest.param({"lora_dropout": 0.1}, "adapter.lora_dropout=0.1 needs memory.checkpointing=none", id="recompute"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        lora(**changes)(small_gpt(levers("full"), CPU))


@pytest.mark.parametrize("quantization", [None, "nf4"], ids=["lora", "qlora"])
def test_an_adapter_needs_a_model_that_can_be_exported(quantization):
    message = "^adapter=lora and adapter=qlora need a model that can be exported: .* differs from qwen3 in: norm$"
    with pytest.raises(ValueError, match=message):
        lora(quantization=quantization)(small_gpt(levers(), CPU, norm="layernorm"))


def test_dropout_drops_in_training_only():
    model = small(settings=lora(lora_dropout=0.5))
    x = stream(CPU)["tokens"]
    assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), small().eval()(x))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        pytest.param("use_dora", True, "not supported: use_dora=true", id="dora"),
        pytest.param("rank_pattern", {"q_proj": 2}, "not supported: rank_pattern", id="rank-pattern"),
        pytest.param("peft_type", "IA3", 'peft_type must be "LORA"; got "IA3"', id="type"),
        pytest.param("bias", "all", 'bias must be "none"; got "all"', id="bias"),
        pytest.param("init_lora_weights", "pissa", "init_lora_weights must be .* got .pissa", id="pissa"),
        pytest.param("r", 5, r"must be \(5, 32\) in this model; got \(4, 32\)", id="shape"),
        pytest.param("target_modules", ["q_proj", "v_proj"], "is missing", id="missing"),
        pytest.param("target_modules", None, "target_modules must be a text or a list; got null", id="no-targets"),
        pytest.param("lora_alpha", None, "lora_alpha must be a number; got null", id="no-alpha"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(field, value, message, tmp_path):
    model = small_gpt(levers(), CPU)
    save_adapter(lora(target_modules=["q_proj"])(model), tmp_path, None)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {field: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        lora(path=str(tmp_path))(small_gpt(levers(), CPU))


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"adapter.path must be a folder with adapter_config.json"):
        lora(path=str(tmp_path))(small_gpt(levers(), CPU))
    model = lora()(small_gpt(levers(), CPU))
    save_adapter(model, tmp_path / "a", None)
    with pytest.raises(ValueError, match=r"needs a new folder or one without an adapter; .* contains an adapter"):
        save_adapter(model, tmp_path / "a", None)
    stored = load_file(tmp_path / "a/adapter_model.safetensors")
    save_file(stored | {"base_model.model.lm_head.weight": torch.zeros(1)}, tmp_path / "a/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight belongs to no adapter of this model"):
        load_adapter(model, tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match="can only be exported from a run with adapter=lora"):
        save_adapter(small_gpt(levers(), CPU), tmp_path / "b", None)


@pytest.mark.parametrize(("text", "message"), [("[]", "must hold an object; got list"), ("{", "is not JSON")])
def test_a_damaged_adapter_config_is_named(text, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"adapter_config.json {message}"):
        lora(path=str(tmp_path))(small_gpt(levers(), CPU))


@pytest.mark.parametrize("optimizer", [adamw_bf16, adamw_master])
def test_optimizers_for_bf16_weights_are_refused(optimizer):
    with pytest.raises(ValueError, match=rf"{optimizer.__name__} cannot train adapters, which are fp32"):
        optimizer(small().bfloat16(), lr=0.1, weight_decay=0.0, betas=[0.9, 0.95], eps=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_a_run_trains_adapters_and_resumes(adapter, tmp_path):
    def run(folder: Path, *overrides: str) -> dict[int, float]:
        folder.mkdir()
        changes = f"adapter={adapter}", "optimizer.lr=0.02", "max_steps=8", "scheduler.max_steps=8"
        settings = tiny(tmp_path, *changes, *overrides)
        with composed(folder, *settings) as cfg:
            training.train(cfg)
        return column(folder, "train/loss")

    whole = run(tmp_path / "whole")
    assert whole[8] < whole[1]
    first = run(tmp_path / "first", "max_steps=4")
    [checkpoint] = (tmp_path / "first").rglob("*.ckpt")
    rest = run(tmp_path / "rest", f"ckpt_path={checkpoint}")
    assert first | rest == whole
    states = torch.load(checkpoint, weights_only=True)["optimizer_states"][0]["state"]
    assert len(states) == 2 * 2 * 7, "A and B of seven matrices in two layers"


def test_no_adapter_is_the_model_itself(tmp_path):
    with composed(tmp_path, *tiny(tmp_path)) as cfg:
        model = training.build(cfg)[1].model
    assert all(p.requires_grad for p in model.parameters())
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear, Head}
