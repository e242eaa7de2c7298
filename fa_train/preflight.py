"""What must hold before a run starts. Each failure is a ValueError that says what was wanted and what came."""

import torch

from fa_train.memory.planner.plan import RunSize
from fa_train.models.gpt import GPT
from fa_train.models.rope import DynamicNTKScaling


def require_vocabulary(vocab_size: int, tokens: int) -> None:
    """The model must have an embedding for each of the tokenizer's tokens."""
    if vocab_size < tokens:
        raise ValueError(f"model.vocab_size must be at least the {tokens} of the data's tokenizer; got {vocab_size}")


def require_reach(model: GPT, seq_len: int, max_doc_len: int | None, reset_positions: bool) -> None:
    """Raises: ValueError if documents may exceed the model's position embeddings or its checkpoint's context.

    Units: seq_len and max_doc_len in tokens, as in fa_train.data.datamodule.PackedDataModule.
    """
    longest = min(seq_len, max_doc_len or seq_len) if reset_positions else seq_len
    model.require_seq_len(longest)
    is_dynamic = any(rope is not None and isinstance(rope.scaling, DynamicNTKScaling) for rope in model.ropes)
    reach = None if model.origin is None or model.config.positions != "rope" or is_dynamic else model.config.max_seq_len
    if reach is not None and longest > reach:
        raise ValueError(
            f"seq_len must be at most the {reach} tokens that the checkpoint reaches; got {seq_len}. "
            f"Use experiment=extend_context, or data.packing=best_fit data.max_doc_len={reach}"
        )


def require_shardable(run: RunSize, *, samples: bool) -> None:
    """ValueError where strategy=fsdp has nothing to shard on, or a part of the run cannot be sharded.

    samples: whether callbacks.sample asks rank 0 alone for answers, which then waits for the others' weights.
    """
    if run.ranks == 1:
        raise ValueError(
            "strategy=fsdp must have at least 2 devices; got 1. Choose strategy=auto, or trainer.devices=2"
        )
    if run.adapters is not None and run.adapters.quantised:
        raise ValueError("strategy=fsdp cannot shard weights in 4 bits; got adapter=qlora. Choose adapter=lora")
    if run.optimizer in ("adamw_8bit", "adamw_offload"):
        raise ValueError(
            "strategy=fsdp must have optimizer=adamw, or adamw_bf16 with trainer.precision=bf16-true: it shards their "
            f"states itself; got {run.optimizer}"
        )
    if samples:
        raise ValueError("strategy=fsdp must have callbacks.sample=null: rank 0 has a part of the weights; got one")


def machine() -> str:
    """What a preset is chosen by."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a CUDA GPU"
