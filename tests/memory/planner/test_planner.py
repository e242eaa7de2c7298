"""The planner's arithmetic against the real model: on fake tensors, on the CPU, and as measured on GPUs."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fa_train.memory import offload
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.memory.planner.levers import COMBINATIONS, Levers, with_levers
from fa_train.memory.planner.optimizer import optimizer_bytes
from fa_train.memory.planner.plan import COMPONENTS, GIB, kept_per_layer, predict
from fa_train.memory.planner.shape import Shape
from fa_train.memory.planner.weights import parameter_sizes, trained_sizes
from fa_train.models.attention import Attention, flash_attention, sdpa_attention
from fa_train.models.gpt import GPT
from fa_train.models.lora import LoRA
from fa_train.preflight import adapters_of
from tests.memory.support.simulated import as_on_a_gpu, kept_by_compiled_block, simulate

GPT2 = Shape(
    n_layers=12,
    dim=768,
    n_heads=12,
    n_kv_heads=12,
    head_dim=64,
    ffn_dim=3072,
    vocab_size=50257,
    activation="gelu",
    tied=True,
    norm="rmsnorm",
    qk_norm=False,
    bias=False,
    rope=True,
    learned_positions=0,
    precision="bf16-mixed",
    tokens=8192,
    checkpointing="none",
    offload=False,
    mlp_chunk=None,
    loss_chunk=4096,
    optimizer="adamw",
    accumulates=False,
    compiled=False,
)
LLAMA_1B = replace(
    GPT2, n_layers=16, dim=2048, n_heads=32, n_kv_heads=8, ffn_dim=8192, vocab_size=128256, activation="swiglu"
)
SMALL = replace(GPT2, dim=64, n_heads=4, n_kv_heads=1, head_dim=16, ffn_dim=96, vocab_size=40, tokens=128)
# by scripts/bench/planner.py (scripts/results/planner_h200_202611.md tells of them), or by what `run` names;
# a `first` step is one before the optimizer has states
MEASURED = json.loads((Path(__file__).parent / "peaks_h200.json").read_text())


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param(m, id="-".join(str(m["shape"][x]) for x in ("n_layers", "tokens", "checkpointing", "optimizer")))
        for m in MEASURED
    ],
)
def test_peaks_measured_on_an_h200(measured):
    prediction = predict(Shape(**measured["shape"]))
    allocated = prediction.allocated - (prediction.optimizer if measured.get("first") else 0)
    assert allocated / GIB == pytest.approx(measured["peak_gib"], rel=0.01)


def build(s: Shape, attention: Attention = flash_attention) -> GPT:
    loss = LinearCrossEntropy(s.loss_chunk)
    return GPT(
        vocab_size=s.vocab_size,
        n_layers=s.n_layers,
        dim=s.dim,
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads,
        head_dim=s.head_dim,
        ffn_dim=s.ffn_dim,
        norm=s.norm,
        norm_eps=1e-5,
        positions="rope" if s.rope else "learned" if s.learned_positions else "none",
        rope_theta=10000.0,
        max_seq_len=s.learned_positions or None,
        activation=s.activation,
        bias=s.bias,
        qk_norm=s.qk_norm,
        tied=s.tied,
        init="gpt2",
        attention=attention,
        loss=loss,
        memory=Memory(s.checkpointing, s.offload, s.mlp_chunk, loss),
    )


def simulated_peak(s: Shape) -> int:
    """Beside weights and the optimizer's states."""
    step = simulate(lambda: build(s), s.tokens, s.precision, s.accumulates)
    gradients = sum(parameter_sizes(s)) * s.weight_bytes if s.accumulates else 0  # of the micro-batches before
    return gradients + max(step.forward, step.backward)


def predicted_peak(s: Shape) -> int:
    prediction = predict(s)
    return prediction.allocated - prediction.weights - prediction.optimizer - prediction.libraries


@pytest.mark.parametrize("mlp_chunk", [None, 4096], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "precision"),
    [(GPT2, "32-true"), (GPT2, "bf16-mixed"), (LLAMA_1B, "bf16-mixed"), (LLAMA_1B, "bf16-true")],
    ids=["gpt2-fp32", "gpt2-mixed", "llama_1b-mixed", "llama_1b-bf16"],
)
def test_saved_activations_are_exact(model, precision, checkpointing, mlp_chunk):
    shape = replace(model, n_layers=1, vocab_size=64, precision=precision, tokens=16384)
    shape = replace(shape, checkpointing=checkpointing, mlp_chunk=mlp_chunk)
    one, two = (
        simulate(lambda s=s: build(s), s.tokens, s.precision, accumulates=True).kept
        for s in (shape, replace(shape, n_layers=2))
    )
    assert two - one == kept_per_layer(shape)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT2, id="gpt2"),
        pytest.param(LLAMA_1B, id="llama_1b"),
        pytest.param(replace(LLAMA_1B, qk_norm=True), id="qk-norm"),
        pytest.param(replace(LLAMA_1B, precision="bf16-true"), id="bf16"),
        pytest.param(replace(LLAMA_1B, mlp_chunk=512), id="ffn-chunks"),
    ],
)
def test_saved_activations_are_exact_where_compiled(model, checkpointing):
    """Of llama_1b's 63,624 bytes a token, 32,768 are what the FFN's first product wrote, and none what follows it."""
    shape = replace(model, n_layers=1, vocab_size=64, tokens=1024, checkpointing=checkpointing, compiled=True)
    assert kept_by_compiled_block(lambda: build(shape), shape.tokens, shape.precision) == kept_per_layer(shape)


def with_adapters(shape: Shape, quantization: Literal["nf4"] | None = None) -> tuple[Shape, Callable[[], GPT]]:
    """The shape of a run with adapter=lora, and its model."""

    def adapted() -> GPT:
        return LoRA(16, 32.0, 0.0, "all-linear", False, quantization, None)(build(shape))

    with torch.device("meta"):
        return replace(shape, adapters=adapters_of(adapted())), adapted


# half of all: the fourth by the other three, so that any three are there in every combination
@pytest.mark.parametrize(
    ("model", "precision", "levers"),
    [
        (
            ("gpt2", "llama_1b")[a],
            ("bf16-mixed", "bf16-true")[b],
            (("none", "selective")[c], False, (None, 8192)[a ^ b ^ c]),
        )
        for a, b, c in product((0, 1), repeat=3)
    ]
    + [("llama_1b", "bf16-mixed", ("none", "all", mlp_chunk)) for mlp_chunk in (None, 8192)],
)
def test_simulated_peaks_of_adapters(model, precision, levers):
    n_layers = 12 if "all" in levers else 4  # what stays by mistake is to count
    base = replace({"gpt2": GPT2, "llama_1b": LLAMA_1B}[model], n_layers=n_layers, vocab_size=259, tokens=32768)
    shape, adapted = with_adapters(with_levers(replace(base, precision=precision), Levers(*levers)))
    step = simulate(adapted, shape.tokens, shape.precision, accumulates=False)
    assert predicted_peak(shape) == pytest.approx(max(step.forward, step.backward), rel=0.05)


def test_frozen_weights_have_no_states_and_4_bits():
    whole, (shape, _), (small, _) = LLAMA_1B, with_adapters(LLAMA_1B), with_adapters(LLAMA_1B, "nf4")
    trained, parameters = sum(trained_sizes(shape)), sum(parameter_sizes(whole))
    assert trained == 16 * 16 * (4 * 2048 + 2048 + 2 * 512 + 2048 + 2048 + 2048 + 2 * 8192 + 2 * 2048 + 8192 - 2048)
    assert optimizer_bytes(shape) == (8 * trained, 0)
    assert predict(shape).weights == 4 * (parameters + trained)
    assert predict(shape).gradients <= 4 * trained < predict(replace(whole, accumulates=True)).gradients
    matrices = 16 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert predict(small).weights == pytest.approx(4 * (parameters + trained - matrices) + 0.516 * matrices, rel=1e-3)


def test_a_tied_embeddings_gradients_are_added_in_place():
    """As predict counts them; autograd does so for tensors with data alone."""
    shape = replace(LLAMA_1B, n_layers=1, dim=16, n_heads=2, n_kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=67)
    tokens = torch.arange(20)
    loss = build(shape, sdpa_attention)(tokens, labels=tokens)
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    added = {event.name for event in profile.events() if event.input_shapes[:2] == [[67, 16], [67, 16]]}
    assert {"aten::add", "aten::add_"} & added == {"aten::add_"}


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "whole-vocabulary": {"vocab_size": 128256, "tokens": 8192},
    "untied": {"tied": False},
    "few-tokens": {"tokens": 4096, "vocab_size": 65536},  # fewer, or more words, and a tied embedding's gradient would
    # be the most, which autograd adds to the head's in place, but not where tensors are simulated
    "layernorm-bias": {"norm": "layernorm", "bias": True},
    "qk-norm": {"qk_norm": True},
    "learned-positions": {"rope": False, "learned_positions": 32768},
    "one-layer": {"n_layers": 1},
    "last-chunk-shorter": {"mlp_chunk": 20000},
    "attention-most": {"mlp_chunk": 1024, "ffn_dim": 1024, "qk_norm": True},
    "fp32": {"precision": "32-true"},
    "bf16": {"precision": "bf16-true"},
    "bf16-untied": {"precision": "bf16-true", "tied": False, "vocab_size": 128256},
    "one-micro-batch": {"accumulates": False},
    "one-micro-batch-fp32": {"accumulates": False, "precision": "32-true", "vocab_size": 128256},
    "one-micro-batch-untied": {"accumulates": False, "tied": False, "vocab_size": 128256},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "levers",
    [Levers("none", False, None), Levers("selective", True, 8192), Levers("none", "all", 8192)],
    ids=["none", "offload", "offload-all"],
)
def test_simulated_peaks(levers, case):
    shape = replace(LLAMA_1B, n_layers=4, vocab_size=259, tokens=32768, accumulates=True)
    shape = replace(with_levers(shape, levers), **CASES[case])
    assert predicted_peak(shape) == pytest.approx(simulated_peak(shape), rel=0.02)


@pytest.mark.parametrize("mlp_chunk", [None, 8192], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("offload", [False, "all"])
@pytest.mark.parametrize("changes", [{"activation": "geglu"}, {"qk_norm": True}], ids=["geglu", "qk-norm"])
def test_simulated_peaks_of_many_layers(changes, offload, mlp_chunk):
    shape = replace(
        LLAMA_1B, n_layers=12, vocab_size=259, tokens=32768, offload=offload, mlp_chunk=mlp_chunk, **changes
    )
    assert predicted_peak(shape) == pytest.approx(simulated_peak(shape), rel=0.03)


@pytest.mark.parametrize("levers", COMBINATIONS, ids=str)
def test_simulated_peaks_under_every_combination(levers):
    shape = with_levers(replace(GPT2, n_layers=6, tokens=65536), levers)
    assert predicted_peak(shape) == pytest.approx(simulated_peak(shape), rel=0.02)


@pytest.mark.parametrize("mlp_chunk", [None, 64], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_autograd_saves_on_the_cpu(activation, checkpointing, mlp_chunk):
    """Real tensors, in fp32. Selective checkpointing keeps attention's results where no hook sees them."""
    tokens, saved = SMALL.tokens, []
    shape = replace(SMALL, activation=activation, precision="32-true", checkpointing=checkpointing, mlp_chunk=mlp_chunk)
    for n_layers in (2, 3):
        model, storages = build(replace(shape, n_layers=n_layers), sdpa_attention), {}
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x: Tensor, storages: dict[int, int] = storages, parameters: set[int] = parameters) -> Tensor:
            if x.untyped_storage().data_ptr() not in parameters:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        labels = torch.zeros(tokens, dtype=torch.int64)
        with as_on_a_gpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(tokens, dtype=torch.int64), labels=labels)
        saved.append(sum(storages.values()))
    assert saved[1] - saved[0] == kept_per_layer(shape)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk-norm", "no-qk-norm"])
def test_parameters_are_those_of_the_model(tied, bias, norm, qk_norm):
    for positions in ({"rope": True}, {"rope": False, "learned_positions": 1024}):
        shape = replace(LLAMA_1B, tied=tied, bias=bias, norm=norm, qk_norm=qk_norm, **positions)
        with torch.device("meta"):
            model = build(replace(shape, n_layers=2))
            if tied:
                model.head.weight = model.token_embedding.weight
        sizes = sorted(p.numel() for p in model.parameters())
        assert sorted(parameter_sizes(replace(shape, n_layers=2))) == sizes


def test_components_add_up():
    for shape in (GPT2, with_levers(LLAMA_1B, Levers("selective", True, 8192))):
        prediction = predict(shape)
        parts = [getattr(prediction, name) for name in COMPONENTS]
        assert sum(parts) == prediction.gpu_bytes == prediction.allocated + prediction.overhead
        assert all(part >= 0 for part in parts)


@pytest.mark.parametrize("mlp_chunk", [None, 16], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_host_memory_of_everything(qk_norm, mlp_chunk):
    """What a forward asks of the pool, in fp32 on the CPU."""
    shape = replace(SMALL, n_layers=3, activation="swiglu", precision="32-true", qk_norm=qk_norm)
    shape = replace(shape, offload="all", mlp_chunk=mlp_chunk)
    model, tokens, taken = build(shape, sdpa_attention), torch.zeros(shape.tokens, dtype=torch.int64), []
    with as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        take = offload.HostPool.take
        patch.setattr(offload.HostPool, "take", lambda pool, n: taken.append(n) or take(pool, n))
        model(tokens, labels=tokens)
    assert predict(shape).host == sum(taken)


def test_host_memory():
    offloaded = replace(LLAMA_1B, offload=True, tokens=2**20)
    assert predict(offloaded).host == 15 * 2**20 * 2048 * 4  # of all blocks but the last
    assert predict(replace(offloaded, precision="bf16-true")).host == predict(offloaded).host // 2
    assert predict(LLAMA_1B).host == 0
    host = predict(replace(LLAMA_1B, optimizer="adamw_offload")).host
    parameters = sum(parameter_sizes(LLAMA_1B))
    # pinned weights and gradients, rounded up to powers of two, and two moments
    assert 16 * parameters * 0.99 < host < 24 * parameters


def test_optimizers_states():
    parameters = sum(parameter_sizes(LLAMA_1B))
    on_gpu = {
        kind: optimizer_bytes(replace(LLAMA_1B, optimizer=kind))[0] / parameters
        for kind in ("adamw", "adamw_8bit", "adamw_bf16", "adamw_offload")
    }
    assert on_gpu["adamw"] == on_gpu["adamw_bf16"] == 8  # of weights in fp32
    assert on_gpu["adamw_8bit"] == pytest.approx(2 + 8 / 256, rel=1e-3)
    assert on_gpu["adamw_offload"] == pytest.approx(0, abs=1e-3)
    assert optimizer_bytes(replace(LLAMA_1B, optimizer="adamw_bf16", precision="bf16-true"))[0] == 4 * parameters


def test_unknown_settings():
    with pytest.raises(ValueError, match=r"trainer.precision must be one of .*; got 16-mixed"):
        replace(GPT2, precision="16-mixed")
    with pytest.raises(ValueError, match=r"memory.checkpointing must be one of .*; got most"):
        replace(GPT2, checkpointing="most")
