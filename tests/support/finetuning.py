"""Saves a tiny model with a chat template, from which fine-tuning starts."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.support.chats import save_tokenizer


def write_base(folder: Path, vocab_size: int = 400) -> Path:
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
