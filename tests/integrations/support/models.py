"""Tiny transformers models with settings that attention must support, and functions for their logits and gradients."""

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 61
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"sliding_window": 5, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-three-to-one": ("Llama", DECODER | {"hidden_size": 24, "num_attention_heads": 3, "head_dim": 16}),
    "qwen3-qk-norm-wide-heads": ("Qwen3", DECODER | {"head_dim": 24}),
    "mistral-window": ("Mistral", DECODER | {"sliding_window": 5, "head_dim": 12}),
    "gemma2-soft-cap": (
        "Gemma2",
        DECODER | WINDOWED | {"head_dim": 12, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0},
    ),
    "gemma3-windows": ("Gemma3Text", DECODER | WINDOWED | {"head_dim": 12, "query_pre_attn_scalar": 3}),
    "gpt_oss-sinks": ("GptOss", DECODER | WINDOWED | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "phi3-partial-rope": ("Phi3", DECODER | {"partial_rotary_factor": 0.5, "sliding_window": 7}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}),
    "persimmon-layers-without-position_ids": (
        "Persimmon",
        {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
    ),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}),
}
EXPERTS = {"GptOss": {"experts_implementation": "eager"}}  # grouped_mm does not support fp64
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def tiny(name: str, **fields: Any) -> Any:
    """Returns a model of `MODELS` in evaluation mode, with eager attention and random weights."""
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings | fields)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))._from_config(
        config, attn_implementation="eager", **EXPERTS.get(family, {})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def logits_and_gradients(model: Any, ids: Tensor, weight: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Returns the logits, and the gradients of sum(logits * weight). Each gradient is divided by the magnitude of its
    largest element.

    weight: a tensor that can be broadcast to the shape of the logits. Where weight is 0, the returned logits are 0.
    """
    model.zero_grad()
    logits = model(ids, use_cache=False, **inputs).logits
    counts = weight.to(logits.dtype)
    (logits * counts).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    relative = torch.cat([(x / x.abs().max().clamp_min(1e-30)).flatten() for x in gradients])
    return torch.where(counts != 0, logits.detach(), 0), relative
