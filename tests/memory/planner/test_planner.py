"""Compares the memory planner's predictions with the memory that the real model needs.

By default, the cases of most tests contain every combination of the values of any two settings. With PLANNER_CASES=all,
all cases run.

In the files of measured peaks, `run` is the command that measured a peak. If `first` is true, the peak was measured in
the first step, in which the optimizer had no states yet. The field `keys` is the number of tokens in each rank's
buffers of keys and values during the measurement. If `keys` is missing, the planner uses its default, which is an upper
bound of `keys`.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_kernels.flash_attention.backend import backward_workspace
from fa_train.memory import host_memory
from fa_train.memory.memory import Levers
from fa_train.memory.planner.block import BlockBytes
from fa_train.memory.planner.levers import COMBINATIONS, with_levers
from fa_train.memory.planner.optimizer import optimizer_bytes
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import COMPONENTS, GIB, predict
from fa_train.memory.planner.weights import parameter_sizes
from fa_train.models.attention import sdpa_attention
from fa_train.models.config import Family
from tests.memory.support.plans import (
    EVERY_CASE,
    GPT2,
    LLAMA_1B,
    SMALL,
    build,
    changed,
    kept_per_layer,
    predicted_peak,
    recorded,
)
from tests.memory.support.simulated import as_on_a_gpu, kept_by_compiled_block, simulate
from tests.support.marks import slow_if

# the norms and the activation of Gemma 2 and 3
GEMMA: dict[str, Any] = {"norm": "offset_rmsnorm", "activation": "geglu", "family": Family(post_norms=True)}


def name_of(measured: dict[str, Any]) -> str:
    plan = recorded(measured["plan"])
    ranks = plan.run.ranks if plan.run.buckets == "none" else "ddp"
    step = "-first" if measured.get("first") else ""
    return f"{plan.model.n_layers}-{plan.run.tokens}-{plan.levers.checkpointing}-{plan.run.optimizer}-{ranks}{step}"


RECORDED = {
    f"{file.stem}-{name_of(measured)}-{number}": measured
    for file in sorted(Path(__file__).parent.glob("peaks_*.json"))
    for number, measured in enumerate(json.loads(file.read_text()))
}


def gather(monkeypatch: pytest.MonkeyPatch, plan: Plan, keys: int) -> None:
    """Makes the planner predict the peak of a rank whose buffers hold the keys and values of `keys` tokens."""
    nbytes = 2 * keys * plan.model.kv_dim * plan.run.compute_bytes // plan.run.head_groups
    monkeypatch.setattr(BlockBytes, "_gathered", lambda block: nbytes)


@pytest.mark.parametrize("measured", [pytest.param(measured, id=name) for name, measured in RECORDED.items()])
def test_predictions_are_the_peaks_measured_on_gpus(measured, monkeypatch):
    plan = recorded(measured["plan"])
    if "keys" in measured:
        gather(monkeypatch, plan, measured["keys"])
    prediction = predict(plan)
    allocated = prediction.allocated - (prediction.optimizer if measured.get("first") else 0)
    assert allocated / GIB == pytest.approx(measured["peak_gib"], rel=0.01)


@pytest.mark.parametrize(
    "measured", [pytest.param(measured, id=name) for name, measured in RECORDED.items() if "ranks_gib" in measured]
)
def test_ranks_that_gather_fewer_keys_have_lower_peaks(measured, monkeypatch):
    """By default, the planner predicts the peak of the rank that gathers all keys.

    For each rank, this test tells the planner how many keys the rank gathers.
    `ranks_gib` lists the peaks of all ranks, and `ranks_keys` lists how many keys the buffers of each rank hold.
    """
    plan, peaks, keys = recorded(measured["plan"]), measured["ranks_gib"], measured["ranks_keys"]
    predicted = []
    for gathered in keys:
        gather(monkeypatch, plan, gathered)
        predicted.append(predict(plan).allocated / GIB)
    assert max(peaks) == measured["peak_gib"]
    differences = [max(peaks) - peak for peak in peaks]
    assert differences == pytest.approx([max(predicted) - peak for peak in predicted], abs=0.002)


def simulated_peak(plan: Plan) -> int:
    """Returns the peak bytes of a simulated step, without weights and optimizer states."""
    run = plan.run
    step = simulate(lambda: build(plan), run.tokens, run.precision, run.accumulates, run.buckets)
    # gradients of earlier micro-batches
    gradients = sum(parameter_sizes(plan.model)) * run.weight_bytes if run.accumulates else 0
    return gradients + max(step.forward, step.backward)


MODELS = {
    "gpt2-fp32": (GPT2, "32-true"),
    "gpt2-mixed": (GPT2, "bf16-mixed"),
    "llama_1b-mixed": (LLAMA_1B, "bf16-mixed"),
    "llama_1b-bf16": (LLAMA_1B, "bf16-true"),
}


@pytest.mark.parametrize(
    ("model", "precision", "checkpointing", "mlp_chunk"),
    [
        pytest.param(
            *MODELS[name],
            checkpointing,
            mlp_chunk,
            id=f"{name}-{checkpointing}-{'chunks' if mlp_chunk else 'whole'}",
            marks=slow_if(name != "llama_1b-mixed"),
        )
        for (a, name), (b, checkpointing), (c, mlp_chunk) in product(
            enumerate(MODELS), enumerate(("none", "selective", "full")), enumerate((None, 4096))
        )
        if EVERY_CASE or (a + b + c) % 2 == 0
    ],
)
def test_saved_activations_are_exact(model, precision, checkpointing, mlp_chunk):
    plan = changed(model, n_layers=1, vocab_size=64, precision=precision, seq_len=16384)
    plan = changed(plan, checkpointing=checkpointing, mlp_chunk=mlp_chunk)
    one, two = (
        simulate(lambda s=s: build(s), s.run.tokens, s.run.precision, accumulates=True).kept
        for s in (plan, changed(plan, n_layers=2))
    )
    assert two - one == kept_per_layer(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "checkpointing"),
    [
        pytest.param(plan, checkpointing, id=f"{name}-{checkpointing}")
        for name, plan, ci in (
            ("gpt2", GPT2, ("none", "selective", "full")),
            ("llama_1b", LLAMA_1B, ("none", "selective", "full")),
            ("qk-norm", changed(LLAMA_1B, qk_norm=True), ("selective",)),
            ("bf16", changed(LLAMA_1B, precision="bf16-true"), ("full",)),
            ("ffn-chunks", changed(LLAMA_1B, mlp_chunk=512), ("none",)),
            ("post-norms", changed(LLAMA_1B, family=Family(post_norms=True)), ("none",)),
            ("gemma", changed(LLAMA_1B, **GEMMA), ("none",)),
            ("gemma-chunks", changed(LLAMA_1B, mlp_chunk=512, **GEMMA), ("none",)),
        )
        for checkpointing in ("none", "selective", "full")
        if EVERY_CASE or checkpointing in ci
    ],
)
def test_saved_activations_are_exact_where_compiled(model, checkpointing):
    """llama_1b keeps 63,624 bytes per token, including 32,768 bytes for the output of the FFN's first matmul.

    With SwiGLU and post_norms, but no checkpointing, the planner counts one tensor that only torch 2.11 keeps.
    """
    plan = changed(model, n_layers=1, vocab_size=64, seq_len=1024, checkpointing=checkpointing, compiled=True)
    kept = kept_by_compiled_block(lambda: build(plan), plan.run.tokens, plan.run.precision)
    is_post_normed_swiglu = model.model.extras.post_norms and model.model.activation == "swiglu"
    if is_post_normed_swiglu and checkpointing == "none" and torch.__version__ >= "2.12":
        kept += plan.run.tokens * model.model.dim * 2
    assert kept == kept_per_layer(plan)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"precision": "bf16-mixed", "mlp_chunk": 512, "checkpointing": "full", "activation": "gelu"}, id="post-norm"
        ),
        pytest.param({"precision": "bf16-true", "offload": True}, id="input-not-offloaded"),
        pytest.param({"precision": "bf16-true", "ffn_dim": 64, "family": Family()}, id="last-norms-backward"),
    ],
)
def test_what_norms_convert_to_fp32_is_counted(changes):
    """Gemma's norms compute in fp32. In eager code, they save an fp32 copy of their input."""
    plan = changed(LLAMA_1B, **{"n_layers": 2, "vocab_size": 1024, "seq_len": 16384} | GEMMA | changes)
    step = simulate(lambda: build(plan), plan.run.tokens, plan.run.precision, accumulates=False)
    assert predicted_peak(plan) == pytest.approx(max(step.forward, step.backward), rel=0.01)


def test_a_tied_embeddings_gradients_are_added_in_place():
    """`predict` assumes that autograd adds the two gradients of a tied embedding in place.

    The tensors are real, because autograd does not add fake tensors in place.
    """
    plan = changed(LLAMA_1B, n_layers=1, dim=16, n_heads=2, n_kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=67)
    tokens = torch.arange(20)
    loss = build(plan, sdpa_attention)(tokens, labels=tokens)
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    added = {event.name for event in profile.events() if event.input_shapes[:2] == [[67, 16], [67, 16]]}
    assert {"aten::add", "aten::add_"} & added == {"aten::add_"}


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "whole-vocabulary": {"vocab_size": 128256, "seq_len": 8192},
    "untied": {"tied": False},
    "capped-logits": {"vocab_size": 128256, "seq_len": 8192, "family": Family(logit_softcap=30.0)},
    # With fewer tokens or a larger vocabulary, the peak would occur while autograd adds the tied embedding's gradients.
    # The simulation of this addition is wrong, because autograd does not add fake tensors in place.
    "few-tokens": {"seq_len": 4096, "vocab_size": 65536},
    "layernorm-bias": {"norm": "layernorm", "bias": True},
    "qk-norm": {"qk_norm": True},
    "learned-positions": {"positions": "learned", "max_seq_len": 32768},
    "post-norms": {"family": Family(post_norms=True)},
    "post-norms-fp32": {"precision": "32-true", "family": Family(post_norms=True)},
    "post-norms-bf16": {"precision": "bf16-true", "family": Family(post_norms=True)},
    "one-layer": {"n_layers": 1},
    "last-chunk-shorter": {"mlp_chunk": 20000},
    "attention-most": {"mlp_chunk": 8192, "ffn_dim": 1024, "qk_norm": True},
    "fp32": {"precision": "32-true"},
    "bf16": {"precision": "bf16-true"},
    "bf16-untied": {"precision": "bf16-true", "tied": False, "vocab_size": 128256},
    "one-micro-batch": {"accumulates": False},
    "one-micro-batch-fp32": {"accumulates": False, "precision": "32-true", "vocab_size": 128256},
    "one-micro-batch-untied": {"accumulates": False, "tied": False, "vocab_size": 128256},
}


SIMULATED_LEVERS = {
    "none": Levers("none", False, None),
    "offload": Levers("selective", True, 8192),
    "offload-all": Levers("none", "all", 8192),
}
# By default, a quarter of the cases also run with `offload`, and another quarter with `offload-all`.
SIMULATED = [
    pytest.param(levers, case, marks=slow_if(case not in ("default", "capped-logits")))
    for number, case in enumerate(CASES)
    for levers in SIMULATED_LEVERS
    if EVERY_CASE or levers in ("none", ("offload", "", "offload-all", "")[number % 4])
]


@pytest.mark.parametrize(("levers", "case"), SIMULATED)
def test_predictions_are_the_simulated_peaks(levers, case):
    plan = changed(LLAMA_1B, n_layers=4, vocab_size=259, seq_len=32768, accumulates=True)
    plan = changed(with_levers(plan, SIMULATED_LEVERS[levers]), **CASES[case])
    assert predicted_peak(plan) == pytest.approx(simulated_peak(plan), rel=0.02)


DDP_CASES: dict[str, dict[str, Any]] = {
    "backward": {"vocab_size": 259, "seq_len": 32768},
    "first-blocks-backward": {"vocab_size": 259, "seq_len": 2048},
    "ffn-chunks": {"vocab_size": 259, "seq_len": 2048, "mlp_chunk": 512},
    "loss": {"vocab_size": 128256, "seq_len": 8192},
    "embeddings-backward": {"vocab_size": 128256, "seq_len": 256, "tied": False},
    "bf16": {"vocab_size": 259, "seq_len": 4096, "precision": "bf16-true"},
}


@pytest.mark.parametrize(
    ("changes", "buckets", "accumulates"),
    [
        pytest.param(
            DDP_CASES[name],
            buckets,
            accumulates,
            id=f"{name}-{buckets}-{'accumulates' if accumulates else 'one-micro-batch'}",
            marks=slow_if(name != "first-blocks-backward"),
        )
        for (a, name), (b, buckets), accumulates in product(
            enumerate(DDP_CASES), enumerate(("views", "copies")), (False, True)
        )
        if EVERY_CASE or (a + b + accumulates) % 2 == 0
    ],
)
def test_predictions_are_the_simulated_peaks_with_ddp(changes, buckets, accumulates):
    """With several micro-batches per step, the peak is in a micro-batch before the last one."""
    plan = changed(LLAMA_1B, n_layers=4, accumulates=accumulates, buckets=buckets)
    plan = changed(plan, **changes)
    assert predicted_peak(plan) == pytest.approx(simulated_peak(plan), rel=0.02)
    gradients = sum(parameter_sizes(plan.model)) * plan.run.weight_bytes
    more = predicted_peak(plan) - predicted_peak(changed(plan, buckets="none"))
    assert 0 < more <= gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offload", "mlp_chunk"),
    [
        pytest.param(
            name, (False, "all")[a], (None, 8192)[b], id=f"{name}-{('kept', 'all')[a]}-{('whole', 'chunks')[b]}"
        )
        for number, name in enumerate(("geglu", "qk-norm"))
        for a, b in product((0, 1), repeat=2)
        if EVERY_CASE or (number + a + b) % 2 == 0
    ],
)
def test_predictions_are_the_simulated_peaks_of_many_layers(name, offload, mlp_chunk):
    changes = {"geglu": {"activation": "geglu"}, "qk-norm": {"qk_norm": True}}[name]
    plan = changed(
        LLAMA_1B, n_layers=12, vocab_size=259, seq_len=32768, offload=offload, mlp_chunk=mlp_chunk, **changes
    )
    assert predicted_peak(plan) == pytest.approx(simulated_peak(plan), rel=0.03)


def test_a_block_frees_the_result_of_its_first_projection_before_its_second():
    """If a recomputed block kept the result of its first projection, the step's peak would be in the block's second
    projection.
    """
    plan = changed(GPT2, n_layers=2, vocab_size=259, seq_len=131072, checkpointing="full", mlp_chunk=16384)
    assert predicted_peak(plan) == pytest.approx(simulated_peak(plan), rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("levers", COMBINATIONS, ids=str)
def test_predictions_are_the_simulated_peaks_of_every_combination(levers):
    plan = with_levers(changed(GPT2, n_layers=3, seq_len=65536), levers)
    assert predicted_peak(plan) == pytest.approx(simulated_peak(plan), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("levers", [Levers("none", False, None), Levers("selective", True, 8192)], ids=str)
def test_predictions_are_the_simulated_peaks_of_gemma(levers, precision):
    plan = changed(LLAMA_1B, n_layers=4, vocab_size=259, seq_len=32768, accumulates=True, precision=precision, **GEMMA)
    assert predicted_peak(with_levers(plan, levers)) == pytest.approx(
        simulated_peak(with_levers(plan, levers)), rel=0.05
    )


def test_a_post_norm_has_weights():
    plan = changed(LLAMA_1B, family=Family(post_norms=True))
    assert sum(parameter_sizes(plan.model)) == sum(parameter_sizes(LLAMA_1B.model)) + 2 * 2048 * 16


@pytest.mark.parametrize("mlp_chunk", [None, 64], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_predictions_are_what_autograd_saves_on_the_cpu(activation, checkpointing, mlp_chunk):
    """Saved-tensor hooks do not see attention's outputs, which selective checkpointing stores elsewhere."""
    tokens, saved = SMALL.run.tokens, []
    plan = changed(SMALL, activation=activation, precision="32-true", checkpointing=checkpointing, mlp_chunk=mlp_chunk)
    for n_layers in (2, 3):
        model, storages = build(changed(plan, n_layers=n_layers), sdpa_attention), {}
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x: Tensor, storages: dict[int, int] = storages, parameters: set[int] = parameters) -> Tensor:
            if x.untyped_storage().data_ptr() not in parameters:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        labels = torch.zeros(tokens, dtype=torch.int64)
        with as_on_a_gpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(tokens, dtype=torch.int64), labels=labels)
        saved.append(sum(storages.values()))
    assert saved[1] - saved[0] == kept_per_layer(plan)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk-norm", "no-qk-norm"])
def test_parameters_are_those_of_the_model(tied, bias, norm, qk_norm):
    for positions in ({}, {"positions": "learned", "max_seq_len": 1024}):
        plan = changed(LLAMA_1B, tied=tied, bias=bias, norm=norm, qk_norm=qk_norm, **positions)
        with torch.device("meta"):
            model = build(changed(plan, n_layers=2))
            if tied:
                model.head.weight = model.token_embedding.weight
        sizes = sorted(p.numel() for p in model.parameters())
        assert sorted(parameter_sizes(changed(plan, n_layers=2).model)) == sizes


def test_components_add_up():
    for plan in (GPT2, with_levers(LLAMA_1B, Levers("selective", True, 8192))):
        prediction = predict(plan)
        parts = [getattr(prediction, name) for name in COMPONENTS]
        assert sum(parts) == prediction.gpu_bytes == prediction.allocated + prediction.overhead
        assert all(part >= 0 for part in parts)


@pytest.mark.parametrize("mlp_chunk", [None, 16], ids=["ffn-whole", "ffn-chunks"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_host_memory_of_offload_all_is_what_a_forward_takes(qk_norm, mlp_chunk):
    plan = changed(SMALL, n_layers=3, activation="swiglu", precision="32-true", qk_norm=qk_norm)
    plan = changed(plan, offload="all", mlp_chunk=mlp_chunk)
    model, tokens, taken = build(plan, sdpa_attention), torch.zeros(plan.run.tokens, dtype=torch.int64), []
    with as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        take = host_memory.HostPool.take
        patch.setattr(host_memory.HostPool, "take", lambda pool, n: taken.append(n) or take(pool, n))
        model(tokens, labels=tokens)
    assert predict(plan).host == sum(taken)


def test_the_host_memory_counts_offload_and_optimizer():
    offloaded = changed(LLAMA_1B, offload=True, seq_len=2**20)
    assert predict(offloaded).host == 15 * 2**20 * 2048 * 4  # the inputs of all blocks except the last
    assert predict(changed(offloaded, precision="bf16-true")).host == predict(offloaded).host // 2
    assert predict(LLAMA_1B).host == 0
    host = predict(changed(LLAMA_1B, optimizer="adamw_offload")).host
    parameters = sum(parameter_sizes(LLAMA_1B.model))
    # the host holds AdamW's two moments, and pinned copies of weights and gradients, with sizes rounded up to powers of
    # two
    assert 16 * parameters * 0.99 < host < 24 * parameters


def test_each_optimizers_states_have_their_size():
    parameters = sum(parameter_sizes(LLAMA_1B.model))
    on_gpu = {
        kind: optimizer_bytes(changed(LLAMA_1B, optimizer=kind))[0] / parameters
        for kind in ("adamw", "adamw_8bit", "adamw_bf16", "adamw_offload")
    }
    assert on_gpu["adamw"] == on_gpu["adamw_bf16"] == 8  # bytes of optimizer states per fp32 weight
    assert on_gpu["adamw_8bit"] == pytest.approx(2 + 8 / 256, rel=1e-3)
    assert on_gpu["adamw_offload"] == pytest.approx(0, abs=1e-3)
    for kind, size in (("adamw_bf16", 4), ("adamw_master", 10)):
        half = changed(LLAMA_1B, optimizer=kind, precision="bf16-true")
        assert optimizer_bytes(half)[0] == size * parameters
        assert optimizer_bytes(changed(half, ranks=8))[0] == size * parameters // 8


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"trainer.precision must be one of .*; got 16-mixed"):
        changed(GPT2, precision="16-mixed")
    with pytest.raises(ValueError, match=r"memory.checkpointing must be one of .*; got most"):
        changed(GPT2, checkpointing="most")


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "softcap", "elements"),
    [
        pytest.param("sm90", 64, torch.bfloat16, 0.0, 3 + 64, id="hopper"),
        pytest.param("sm90", 128, torch.float16, 50.0, 3, id="two-kernels"),
        pytest.param("sm90", 256, torch.bfloat16, 0.0, 3, id="wide"),
        pytest.param("sm90", 32, torch.bfloat16, 0.0, 1, id="no-hopper-kernel"),
        pytest.param("sm90", 64, torch.float32, 0.0, 1, id="fp32"),
        pytest.param("sm80", 64, torch.bfloat16, 0.0, 1, id="ampere"),
    ],
)
def test_the_workspace_of_attentions_backward_depends_on_the_kernel(arch, head_dim, dtype, softcap, elements):
    """The workspace has `elements` fp32 elements per query and head."""
    assert backward_workspace(head_dim, dtype, softcap, arch) == 4 * elements


def test_the_example_in_the_docstring_of_block_bytes():
    plan = changed(LLAMA_1B, seq_len=1, compiled=True)
    kept = BlockBytes(plan)
    saved = BlockBytes(changed(plan, checkpointing="selective")).saved()
    assert f"attention_kept = {kept.attention_kept()}" in str(BlockBytes.__doc__)
    assert f"ffn_kept       = {kept.ffn_kept()}" in str(BlockBytes.__doc__)
    assert f"`saved` is {saved}" in str(BlockBytes.__doc__)


def test_the_planner_asks_for_the_workspace_of_its_gpu():
    plan = changed(LLAMA_1B, n_layers=1, checkpointing="full", vocab_size=40, seq_len=2**15)
    hopper, ampere = (
        BlockBytes(changed(plan, arch=arch)).backward_peaks()["attention's backward"] for arch in ("sm90", "sm80")
    )
    assert hopper - ampere == 2**15 * 32 * 4 * (2 + 64)
