"""Small models with random adapters, and the memory levers with which they are tested."""

from typing import Any

import pytest
import torch

from fa_train.memory.memory import Memory
from fa_train.models.gpt import GPT
from fa_train.models.lora import LoRA, adapter_tensors
from tests.memory.support.small import levers, small_gpt

CPU = torch.device("cpu")
SELECTIVE = pytest.param(levers("selective"), id="selective")
COMPILED_CHUNKS = [
    pytest.param(levers("none", mlp_chunk=5), id="mlp-chunk"),
    pytest.param(levers("full", offload=True, mlp_chunk=5), id="all"),
]
MEMORIES = [
    SELECTIVE,
    pytest.param(levers("full"), id="full"),
    pytest.param(levers("none", offload=True), id="offload"),
    pytest.param(levers("none", offload="all", mlp_chunk=5), id="offload-all"),
    pytest.param(levers("none", mlp_chunk=5), id="mlp-chunk"),
    pytest.param(levers("full", offload=True, mlp_chunk=5), id="all"),
]


def lora(**changes: Any) -> LoRA:
    """Returns the settings of an adapter: rank 4 on all linear layers, unless `changes` replaces a setting."""
    settings: dict[str, Any] = {
        "r": 4, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": "all-linear", "use_rslora": False,
        "quantization": None, "path": None,
    }  # fmt: skip
    return LoRA(**(settings | changes))


def randomised(model: GPT) -> GPT:
    """Fills the adapters with random values, because the initial B of 0 would hide most mistakes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter_tensors(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def small(memory: Memory | None = None, settings: LoRA | None = None, **overrides: Any) -> GPT:
    """Builds a model with the same weights and adapters in every call."""
    if overrides.get("activation") == "gelu":
        overrides["qk_norm"] = False  # no model family has both GELU and qk_norm
    return randomised((settings or lora())(small_gpt(memory or levers(), CPU, **overrides)))
