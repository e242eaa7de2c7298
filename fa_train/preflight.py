"""Checks a run's settings before the run starts. A check that fails raises a ValueError."""

import torch

from fa_train.memory.planner.plan import Buckets, Plan, RunSize
from fa_train.models.float8 import MULTIPLE, require_float8_model
from fa_train.models.gpt import GPT
from fa_train.models.rope import DynamicNTKScaling


def require_vocabulary(vocab_size: int, tokens: int) -> None:
    """Raises: ValueError if the tokenizer has more tokens than the model has embeddings."""
    if vocab_size < tokens:
        raise ValueError(f"model.vocab_size must be at least the tokenizer's vocabulary, {tokens}; got {vocab_size}")


def require_reach(model: GPT, seq_len: int, max_doc_len: int | None, reset_positions: bool) -> None:
    """Checks that the model supports the length of the longest possible document.

    A model with learned positions supports as many tokens as it has positions. A pretrained model with RoPE supports
    the context length of its checkpoint, or any length if its rope_type is dynamic.
    seq_len, max_doc_len: in tokens, as in fa_train.data.datamodule.PackedDataModule.
    Raises: ValueError if a document can be longer than the model supports.
    """
    longest = min(seq_len, max_doc_len or seq_len) if reset_positions else seq_len
    model.require_seq_len(longest)
    is_dynamic = any(rope is not None and isinstance(rope.scaling, DynamicNTKScaling) for rope in model.ropes)
    reach = None if model.origin is None or model.config.positions != "rope" or is_dynamic else model.config.max_seq_len
    if reach is not None and longest > reach:
        raise ValueError(
            f"seq_len must be at most the {reach} tokens that the checkpoint supports; got {seq_len}. "
            f"Use experiment=extend_context, or data.packing=best_fit data.max_doc_len={reach}"
        )


def require_groups(world_size: int, context: int) -> None:
    """Raises: ValueError if the ranks cannot be divided into groups of `context` ranks that share their sequences."""
    if world_size % context:
        raise ValueError(f"strategy.context must divide the number of devices, {world_size}; got {context}")


def ranks_per_copy(devices: int, replicas: int) -> int:
    """Returns the number of devices over which strategy=fsdp shards each copy of the model.

    Raises: ValueError if there is only one device, or replicas does not divide the devices into groups of at least 2.
    """
    if devices == 1:
        raise ValueError(
            "strategy=fsdp needs at least 2 devices; got 1. Choose strategy=auto, or trainer.devices=2 or more"
        )
    if devices % replicas or devices == replicas:
        raise ValueError(
            f"strategy.replicas must divide the {devices} devices into groups of at least 2; got {replicas}. "
            "strategy=ddp keeps a whole copy on each device"
        )
    return devices // replicas


def gradient_buckets(strategy: str, devices: int, *, views: bool) -> Buckets:
    """Returns how DDP stores gradients in a run, or "none" if the run does not use DDP.

    strategy: the chosen option of conf/strategy. `auto` uses DDP if there are several devices.
    devices: the number of devices on all machines. views: the setting strategy.gradient_as_bucket_view.
    """
    if strategy == "fsdp" or (strategy == "auto" and devices == 1):
        return "none"
    return "views" if views else "copies"


def chooses_reshard(strategy: str, reshard_after_forward: bool | str, attention: str) -> bool:
    """Returns whether the planner chooses the value of strategy.reshard_after_forward.

    strategy, attention: names of the chosen options of conf. With any attention other than flash, "auto" means true,
    because the planner predicts only the memory of flash attention.
    """
    return strategy == "fsdp" and reshard_after_forward == "auto" and attention == "flash"


def require_trained_weights(run: RunSize) -> None:
    """Checks that the optimizer supports the dtype of the trained weights.

    Raises: ValueError if the optimizer needs bf16 weights, and the run trains other weights.
    """
    if run.optimizer not in ("adamw_bf16", "adamw_master"):
        return
    if run.adapters is not None:
        raise ValueError(f"optimizer={run.optimizer} cannot train adapters, which are fp32; choose optimizer=adamw")
    if run.precision != "bf16-true":
        raise ValueError(f"optimizer={run.optimizer} needs trainer.precision=bf16-true; got {run.precision}")


def require_shardable(run: RunSize, *, samples: bool) -> None:
    """Checks that strategy=fsdp supports the run.

    samples: whether callbacks.sample is set. A sample's tokens cannot be divided among the ranks of a context group.
    Raises: ValueError if a part of the run cannot be sharded.
    """
    if run.adapters is not None and run.adapters.quantized:
        raise ValueError("strategy=fsdp cannot shard 4-bit weights; got adapter=qlora. Choose adapter=lora")
    if run.optimizer in ("adamw_8bit", "adamw_offload"):
        raise ValueError(
            "strategy=fsdp needs optimizer=adamw, or optimizer=adamw_master or adamw_bf16 with "
            f"trainer.precision=bf16-true; got {run.optimizer}"
        )
    if samples and run.context > 1:
        raise ValueError(f"strategy.context={run.context} needs callbacks.sample=null; got a callback")


def require_head_groups(plan: Plan, attention: str) -> None:
    """Checks strategy.head_groups.

    attention: the name of the chosen option of conf/attention.
    Raises: ValueError if the KV heads cannot be divided into equal groups. Several groups also need attention=flash and
    a strategy.context of at least 2.
    """
    groups, heads = plan.run.head_groups, plan.model.heads.kv
    if heads % groups:
        raise ValueError(f"strategy.head_groups must divide the {heads} KV heads of the model; got {groups}")
    if groups > 1 and (plan.run.context == 1 or attention != "flash"):
        raise ValueError(
            f"strategy.head_groups={groups} needs attention=flash and strategy.context of at least 2; got "
            f"attention={attention} and strategy.context={plan.run.context}"
        )


def require_float8(model: GPT, run: RunSize, *, sharded: bool) -> None:
    """Checks that a run supports lit_gpt.float8. Does not check the GPU.

    sharded: whether the run has strategy=fsdp.
    Raises: ValueError if the model or a setting of the run does not support float8.
    """
    require_float8_model(model)
    if sharded:
        raise ValueError("lit_gpt.float8 needs strategy=auto or ddp; got fsdp")
    if not run.compiled:
        raise ValueError("lit_gpt.float8 needs lit_gpt.compile_model=true; got false")
    if run.precision == "32-true":
        raise ValueError("lit_gpt.float8 needs trainer.precision=bf16-mixed or bf16-true; got 32-true")
    if run.tokens % MULTIPLE:
        raise ValueError(
            f"lit_gpt.float8 needs seq_len * data.micro_batch_size to be a multiple of {MULTIPLE}; got {run.tokens}"
        )


def machine() -> str:
    """Returns the name of the GPU, or "a machine without a CUDA GPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a CUDA GPU"
