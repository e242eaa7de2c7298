"""Writes tiny checkpoints of every model family, and computes their logits with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.marks import slow_if

VOCAB = 61
LENGTHS = [13, 1, 0, 22]
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_LIKE = LLAMA_LIKE | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-wide-untied": ("GPT2", GPT2 | {"n_inner": 40, "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA_LIKE),
    "llama-biased-own-head": ("Llama", LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-tied": ("Llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "llama-3.1": ("Llama", LLAMA_LIKE | {"rope_parameters": LLAMA3_SCALING}),
    "llama-linear": (
        "Llama",
        LLAMA_LIKE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "llama-yarn": ("Llama", LLAMA_LIKE | {"rope_parameters": YARN}),
    "arcee-gelu": ("Arcee", LLAMA_LIKE | {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", LLAMA_LIKE | {"sliding_window": 5}),
    "mistral-no-window": ("Mistral", LLAMA_LIKE | {"sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen2-windows": ("Qwen2", LLAMA_LIKE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", LLAMA_LIKE | {"head_dim": 16}),
    "smollm3": ("SmolLM3", LLAMA_LIKE | {"no_rope_layers": [1, 0, 1]}),
    "smollm3-windows": (
        "SmolLM3",
        LLAMA_LIKE | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 4},
    ),
    "gemma2": ("Gemma2", GEMMA_LIKE | {"attn_logit_softcapping": 0.4, "final_logit_softcapping": 0.3}),
    "gemma3": ("Gemma3Text", GEMMA_LIKE | {"final_logit_softcapping": 0.5, "layer_types": ALTERNATING}),
    "gemma3-scaled": (
        "Gemma3Text",
        GEMMA_LIKE
        | {
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
    ),
}
ARCHITECTURES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
FAST = ("gpt2", "llama", "qwen3", "gemma3")
FAMILIES = [pytest.param(name, id=name, marks=slow_if(name not in FAST)) for name in CHECKPOINTS]


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def write_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Saves one of `CHECKPOINTS` with random parameters, and returns its transformers model.

    options: arguments of save_pretrained. The model has eager attention, because SDPA attention has no soft cap.
    """
    family, fields = CHECKPOINTS[name]
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(dtype).save_pretrained(folder, **options)
    return model


def write_with_images(folder: Path) -> Path:
    """Saves a Gemma 3 model with an image encoder and random weights."""
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(
        text_config=GEMMA_LIKE | {"layer_types": ALTERNATING},
        vision_config=images | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def theirs(folder: Path, stream: Tensor) -> Tensor:
    """Returns the logits that transformers computes for one document.

    transformers uses eager attention, because its other kinds of attention have no soft cap.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()(stream[None]).logits[0]


def assert_relatively_close(ours: Tensor, exact: Tensor, relative: float = 1e-4) -> None:
    error = ((ours - exact).abs().max() / exact.abs().max()).item()
    assert error <= relative, f"max difference {error:.1e} of the largest logit, allowed {relative:.0e}"


def edit_config(folder: Path, **fields) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def assert_same_weights(ours, expected) -> None:
    for (name, a), b in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name
