"""Builds a tiny decoder. Every argument can be overridden."""

import torch

from fa_train.memory.loss import LinearCrossEntropy
from fa_train.models.attention import sdpa_attention
from fa_train.models.gpt import GPT


def build(seed: int = 0, **overrides) -> GPT:
    """Builds a model. Calls with equal arguments give equal weights."""
    arguments = {
        "vocab_size": 40,
        "n_layers": 2,
        "dim": 32,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": None,
        "ffn_dim": 48,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "positions": "rope",
        "rope_theta": 10000.0,
        "max_seq_len": 64,
        "activation": "swiglu",
        "bias": False,
        "qk_norm": False,
        "tied": True,
        "init": "gpt2",
        "attention": sdpa_attention,
        "loss": LinearCrossEntropy(chunk_size=7),
    }
    torch.manual_seed(seed)
    return GPT(**(arguments | overrides))
