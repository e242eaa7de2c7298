"""Memory plans of two published models, and functions that change a plan or build the model of a plan."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import torch

from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Levers, Memory
from fa_train.memory.planner.block import BlockBytes
from fa_train.memory.planner.plan import Adapters, Plan, RunSize
from fa_train.memory.planner.predict import GIB, predict
from fa_train.models.attention import Attention, flash_attention
from fa_train.models.config import Family, ModelConfig
from fa_train.models.gpt import GPT
from fa_train.models.lora import LoRA, adapters_of

EVERY_CASE = os.environ.get("PLANNER_CASES") == "all"
HOST = 120 * GIB  # bytes of host memory
GPT2 = Plan(
    ModelConfig(
        vocab_size=50257,
        n_layers=12,
        dim=768,
        n_heads=12,
        n_kv_heads=None,
        head_dim=None,
        ffn_dim=3072,
        norm="rmsnorm",
        norm_eps=1e-5,
        positions="rope",
        rope_theta=500000.0,
        max_seq_len=None,
        activation="gelu",
        bias=False,
        qk_norm=False,
        tied=True,
        init="gpt2",
    ),
    Levers("none", False, None),
    RunSize(
        seq_len=8192,
        precision="bf16-mixed",
        optimizer="adamw",
        accumulates=False,
        compiled=False,
        loss_chunk=4096,
    ),
)


def changed(plan: Plan, **values: Any) -> Plan:
    """Returns a copy of `plan` with new values for some fields of plan.model, plan.levers or plan.run."""
    for part in ("model", "levers", "run"):
        names = {field.name for field in fields(getattr(plan, part))}
        own = {name: values.pop(name) for name in names & values.keys()}
        plan = replace(plan, **{part: replace(getattr(plan, part), **own)}) if own else plan
    assert not values, f"no field of a plan: {', '.join(values)}"
    return plan


LLAMA_1B = changed(
    GPT2,
    n_layers=16,
    dim=2048,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    ffn_dim=8192,
    vocab_size=128256,
    activation="swiglu",
    init="llama",
)
SMALL = changed(GPT2, dim=64, n_heads=4, n_kv_heads=1, head_dim=16, ffn_dim=96, vocab_size=40, seq_len=128)


def recorded(plan: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Returns a plan from the JSON that scripts/bench/planner.py writes."""
    run = dict(plan["run"])
    if run["adapters"] is not None:
        tuples = {name: tuple(values) for name, values in run["adapters"].items() if isinstance(values, list)}
        run["adapters"] = Adapters(**run["adapters"] | tuples)
    model = dict(plan["model"])
    if model["family"] is not None:
        model["family"] = Family(**model["family"])
    return Plan(ModelConfig(**model), Levers(**plan["levers"]), RunSize(**run))


def build(plan: Plan, attention: Attention = flash_attention) -> GPT:
    """Builds the model of a plan, with its memory levers."""
    loss, levers = LinearCrossEntropy(plan.run.loss_chunk), plan.levers
    return GPT(
        **{field.name: getattr(plan.model, field.name) for field in fields(plan.model)},
        attention=attention,
        loss=loss,
        memory=Memory(levers.checkpointing, levers.offload, levers.mlp_chunk, loss),
    )


def with_adapters(
    plan: Plan,
    quantization: Literal["nf4"] | None = None,
    dropout: float = 0.0,
    target_modules: str | list[str] = "all-linear",
) -> tuple[Plan, Callable[[], GPT]]:
    """Returns the plan of a run with adapter=lora, and a function that builds its model."""

    def adapted() -> GPT:
        return LoRA(16, 32.0, dropout, target_modules, False, quantization, None)(build(plan))

    with torch.device("meta"):
        return changed(plan, adapters=adapters_of(adapted())), adapted


def kept_per_layer(plan: Plan) -> int:
    """Returns the predicted bytes that stay on the GPU between forward and backward for each block except the last.

    The result includes copies of the block's weights.
    """
    block = BlockBytes(plan)
    rounded = block.rounded_weights() if plan.levers.checkpointing == "none" else 0
    return block.saved() - block.offloaded() + rounded


def predicted_peak(plan: Plan) -> int:
    """Returns the predicted peak bytes of a step, without weights, optimizer states and the libraries' workspaces."""
    prediction = predict(plan)
    return prediction.allocated - prediction.weights - prediction.optimizer - prediction.libraries
