"""Checks a run's settings before the run starts, and makes its memory plan. A check that fails raises a ValueError.

The checks of this file need the model. fa_train.early_checks has the checks that need no model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from fa_kernels.device import arch_of
from fa_train import early_checks
from fa_train.data.tokens.tokenizer import ByteTokenizer
from fa_train.memory.planner.plan import Buckets, Plan, RunSize
from fa_train.models.float8 import MULTIPLE, require_float8_model
from fa_train.models.gpt import GPT
from fa_train.models.lora import adapters_of
from fa_train.models.rope import DynamicNTKScaling
from fa_train.optim.adamw import kind_of

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # this file exists while NVIDIA's kernel driver is loaded


def require_vocabulary(vocab_size: int, tokens: int) -> None:
    """Raises: ValueError if the tokenizer has more tokens than the model has embeddings."""
    if vocab_size < tokens:
        raise ValueError(f"model.vocab_size must be at least the tokenizer's vocabulary, {tokens}; got {vocab_size}")


def require_tokenizer(model: GPT, source: str, data: Mapping[str, Any]) -> None:
    """Checks that a pretrained model's vocabulary has the right size for a run that uses bytes as tokens.

    source: the name of the chosen option of conf/data. data: the node `data` of the config.
    Raises: ValueError if the run uses bytes as tokens, and the model's vocabulary does not have the size of the byte
    tokenizer's vocabulary.
    """
    is_stdlib = source == "stdlib"
    if model.origin is None or model.config.vocab_size == ByteTokenizer.vocab_size:
        return
    if is_stdlib or data.get("tokenizer", ...) is None:
        name, got = model.origin.pretrained, "data=stdlib" if is_stdlib else "data.tokenizer=null"
        advice = "Choose other data, for example data=text, and set" if is_stdlib else "Set"
        raise ValueError(
            f"data.tokenizer must be the tokenizer of {name}, whose vocabulary has {model.config.vocab_size} tokens; "
            f"got {got}, which uses bytes as tokens. {advice} data.tokenizer={name}"
        )


def reach_of(model: GPT) -> int | None:
    """Returns the number of tokens of the longest document that the model supports, or None if there is no limit.

    A model with learned positions supports as many tokens as it has positions. A pretrained model with RoPE supports
    the context length of its checkpoint, or any length if its rope_type is dynamic.
    """
    if model.position_embedding is not None:
        return model.position_embedding.num_embeddings
    is_dynamic = any(rope is not None and isinstance(rope.scaling, DynamicNTKScaling) for rope in model.ropes)
    return None if model.origin is None or model.config.positions != "rope" or is_dynamic else model.config.max_seq_len


def longest_row(model: GPT, max_doc_len: int | None, reset_positions: bool) -> int | None:
    """Returns the largest seq_len that the model supports, or None if there is no limit.

    seq_len has no limit if documents are cut at max_doc_len and the positions of each document start at 0.
    """
    return None if reset_positions and max_doc_len is not None else reach_of(model)


def require_reach(model: GPT, seq_len: int, max_doc_len: int | None, reset_positions: bool) -> None:
    """Checks that the model supports the length of the longest possible document.

    seq_len, max_doc_len: in tokens, as in fa_train.data.datamodule.PackedDataModule.
    Raises: ValueError if a document can be longer than the model supports.
    """
    longest = min(seq_len, max_doc_len or seq_len) if reset_positions else seq_len
    model.require_seq_len(longest)
    reach = reach_of(model)
    if reach is not None and longest > reach:
        raise ValueError(
            f"seq_len must be at most the {reach} tokens that the checkpoint supports; got {seq_len}. "
            f"Use experiment=extend_context, or data.packing=best_fit data.max_doc_len={reach}"
        )


def plan_of(config: Mapping[str, Any], model: GPT, optimizer: Callable[..., Optimizer], world_size: int) -> Plan:
    """Returns the memory plan of a run. The plan treats strategy.reshard_after_forward=auto as true.

    config: the config of a run. model: the run's model, which may be on the meta device.
    optimizer: the instantiated node `optimizer`. For an unknown optimizer, the plan assumes AdamW.
    Raises: ValueError if the run does not support a setting.
    """
    strategy, data, lit_gpt = config["strategy"], config["data"], config["lit_gpt"]
    sharded = early_checks.is_fsdp(strategy)
    context = strategy.get("context", 1) if sharded else 1
    early_checks.require_groups(world_size, context)
    run = RunSize(
        seq_len=config["seq_len"],
        rows=data["micro_batch_size"],
        precision=config["trainer"]["precision"],
        optimizer=kind_of(optimizer) or "adamw",
        accumulates=config["batch_size"] > data["micro_batch_size"] * (world_size // context),
        compiled=lit_gpt["compile_model"],
        loss_chunk=model.loss.chunk_size,
        adapters=adapters_of(model),
        ranks=early_checks.ranks_per_copy(world_size, strategy["replicas"]) if sharded else 1,
        context=context,
        head_groups=strategy.get("head_groups", 1) if sharded else 1,
        reshard_after_forward=not sharded or strategy["reshard_after_forward"] is not False,
        reduce_once=sharded and strategy["reduce_once"],
        buckets=gradient_buckets(strategy, world_size),
        # without a GPU, the plan is made for an H200
        arch=arch_of(torch.device("cuda")) if torch.cuda.is_available() else "sm90",
        float8=lit_gpt.get("float8") is not None,
    )
    plan = Plan(model.config, model.memory.levers, run)
    require_settings(plan, config["choices"]["attention"], sharded=sharded)
    if run.float8:
        require_float8(model, run, sharded=sharded)
    return plan


def gradient_buckets(strategy: Mapping[str, Any], devices: int) -> Buckets:
    """Returns how DDP stores gradients in a run, or "none" if the run does not use DDP.

    strategy: the node `strategy` of the config. Only the config of strategy=auto has the key `strategy.accelerator`.
    strategy=auto uses DDP if there are several devices.
    devices: the number of devices on all machines.
    """
    if early_checks.is_fsdp(strategy) or ("accelerator" in strategy and devices == 1):
        return "none"
    return "views" if strategy.get("gradient_as_bucket_view", False) else "copies"


def chooses_reshard(strategy: Mapping[str, Any], attention: str) -> bool:
    """Returns whether the planner chooses the value of strategy.reshard_after_forward.

    strategy: the node `strategy` of the config. attention: the name of the chosen option of conf/attention. With any
    attention other than flash, reshard_after_forward=auto means true, because the planner predicts only the memory of
    flash attention.
    """
    return early_checks.is_fsdp(strategy) and strategy["reshard_after_forward"] == "auto" and attention == "flash"


def require_settings(plan: Plan, attention: str, *, sharded: bool) -> None:
    """Repeats some checks of fa_train.early_checks, and checks settings that depend on the model.

    attention: the name of the chosen option of conf/attention. sharded: whether the run has strategy=fsdp.
    Raises: ValueError if the run does not support a setting.
    """
    run = plan.run
    early_checks.require_trained_weights(run.optimizer, run.precision, has_adapters=run.adapters is not None)
    if not sharded:
        return
    quantized = run.adapters is not None and run.adapters.quantized
    early_checks.require_shardable(run.optimizer, quantized=quantized)
    if plan.model.heads.kv % run.head_groups:
        raise ValueError(
            f"strategy.head_groups must divide the {plan.model.heads.kv} KV heads of the model; got {run.head_groups}"
        )
    early_checks.require_head_groups(run.head_groups, run.context, attention)


def require_float8(model: GPT, run: RunSize, *, sharded: bool) -> None:
    """Checks that a run supports lit_gpt.float8. Does not check the GPU.

    sharded: whether the run has strategy=fsdp.
    Raises: ValueError if the model or a setting of the run does not support float8.
    """
    require_float8_model(model)
    early_checks.require_float8_settings(run.precision, sharded=sharded, compiled=run.compiled)
    if run.tokens % MULTIPLE:
        raise ValueError(
            f"lit_gpt.float8 needs seq_len * data.micro_batch_size to be a multiple of {MULTIPLE}; got {run.tokens}"
        )


def machine(device: torch.device) -> str:
    """Returns the name of the run's GPU. For a run on the CPU, says whether torch could use a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.cuda.is_available():
        return "the CPU"
    if NVIDIA_DRIVER.exists():  # torch is a CPU build, the driver is too old, or CUDA_VISIBLE_DEVICES hides all GPUs
        return f"the CPU, because torch {torch.__version__} cannot use this machine's NVIDIA GPU"
    return "a machine without a CUDA GPU"
