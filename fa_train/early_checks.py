"""Checks combinations of settings that can be checked without torch and without a model.

train.py runs these checks before it starts ranks, so that a mistake costs no time. fa_train.preflight has the checks
that need the model.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa_train.cuda_driver import has_gpu
from fa_train.parallel.ranks import devices_per_node
from fa_train.settings import leaves, shown

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# config keys whose values may differ between ranks, for example because all ranks use the ckpt_path of rank 0
LOCAL = {"run_name", "logger", "num_workers", "devices", "ckpt_path", "path", "val_path", "cache_dir"}


def require_runnable(config: Mapping[str, Any], world_size: int) -> None:
    """Runs all checks of this file.

    config: a config that fa_train.settings.check has checked. world_size: the number of ranks on all machines.
    Raises: ValueError if a check fails.
    """
    choices, strategy, adapter, trainer = (config[name] for name in ("choices", "strategy", "adapter", "trainer"))
    sharded = is_fsdp(strategy)
    context = strategy.get("context", 1) if sharded else 1
    precision, optimizer = trainer.get("precision", "32-true"), choices["optimizer"]
    require_checkpoint_name(config["model"].get("pretrained"))
    require_logger(trainer.get("logger"))
    if config.get("epochs") is not None and choices["data"] == "mix":
        raise ValueError("epochs needs one dataset; got data=mix. Set max_steps instead")
    require_64_bits(config["seq_len"], config["max_steps"], config["batch_size"])
    require_device_count(trainer.get("devices", "auto"), trainer.get("accelerator", "auto"))
    require_world_size(trainer, world_size)
    require_groups(world_size, context)
    if sharded:
        ranks_per_copy(world_size, strategy["replicas"])
    micro_batches(config["batch_size"], config["data"]["micro_batch_size"], world_size, context)
    require_trained_weights(optimizer, precision, has_adapters=choices["adapter"] != "none")
    if optimizer == "adamw_offload":
        require_cuda(optimizer, trainer.get("accelerator", "auto"))
    if config["lit_gpt"].get("float8") is not None:
        require_float8_settings(precision, sharded=sharded, compiled=config["lit_gpt"].get("compile_model", False))
    if sharded:
        require_shardable(optimizer, quantized=adapter.get("quantization") is not None)
        require_head_groups(strategy.get("head_groups", 1), context, choices["attention"])
        require_no_upload(config["logger"])


def require_equal_settings(own: Mapping[str, Any], of_rank_zero: Mapping[str, Any], rank: int) -> None:
    """Checks that a rank has the settings of rank 0.

    With other settings, ranks would wait for each other, or silently train in different ways. The function
    ignores keys in `LOCAL`. It also ignores texts with a slash, because paths can differ between machines.
    own, of_rank_zero: configs with unresolved interpolations. The text
    ${oc.env:RANK} is equal on all ranks.
    rank: the rank that has `own`, for the error message.
    Raises: ValueError that names the first setting that differs.
    """
    nothing = object()
    values, wanted = dict(leaves("", own)), dict(leaves("", of_rank_zero))
    for key in values | wanted:
        pair = values.get(key, nothing), wanted.get(key, nothing)
        is_local = LOCAL & {*key.split(".")} or any(isinstance(value, str) and "/" in value for value in pair)
        if pair[0] != pair[1] and not is_local:
            found, expected = ("no value" if value is nothing else shown(value) for value in pair)
            raise ValueError(f"{key} must be equal on all ranks; got {found} on rank {rank} and {expected} on rank 0")


def is_fsdp(strategy: Mapping[str, Any]) -> bool:
    """Returns whether a run uses strategy=fsdp, or a user's own option that is based on fsdp.

    strategy: the config of the strategy. Only configs of FullyShardedStrategy have the key reshard_after_forward.
    FullyShardedStrategy requires this key.
    """
    return "reshard_after_forward" in strategy


def require_checkpoint_name(pretrained: str | None, key: str = "model.pretrained") -> None:
    """Checks the value of model.pretrained without internet access.

    key: the name of the config key, for the error message.
    Raises: ValueError unless the value is null, a folder with a config.json, or a possible name on the hub.
    """
    if pretrained is None:
        return
    path, wanted = Path(pretrained), f"{key} must be a folder with a checkpoint or a name on the hub"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{wanted}; got {pretrained}, a folder without config.json")
    elif path.exists() or not HUB_NAME.fullmatch(pretrained):
        found = "which is a file" if path.exists() else "which does not exist"
        raise ValueError(f"{wanted}; got {pretrained}, {found}")


def require_64_bits(seq_len: int, max_steps: int, batch_size: int) -> None:
    """Raises: ValueError if seq_len or the number of rows of the run is too large for a 64-bit integer."""
    for name, number in (("seq_len", seq_len), ("max_steps * batch_size", max_steps * batch_size)):
        if number >= 2**63:
            raise ValueError(f"{name} must be less than 2**63; got {number}")


def require_groups(world_size: int, context: int) -> None:
    """Raises: ValueError if the ranks cannot be divided into groups of `context` ranks that share their sequences."""
    if world_size % context:
        raise ValueError(f"strategy.context must divide the number of devices, {world_size}; got {context}")


def ranks_per_copy(devices: int, replicas: int) -> int:
    """Returns the number of devices over which strategy=fsdp shards each copy of the model.

    Raises: ValueError if there is only one device, or if the devices cannot be divided into `replicas` equal groups of
    at least 2 devices.
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


def micro_batches(batch_size: int, micro_batch_size: int, world_size: int, context: int) -> int:
    """Returns the number of micro-batches per step and process.

    context: the number of processes that share a micro-batch.
    Raises: ValueError if batch_size is not a multiple of micro_batch_size * world_size / context.
    """
    rows = micro_batch_size * (world_size // context)
    steps, rest = divmod(batch_size, rows)
    if rest or not steps:
        shared = f" / strategy.context={context}" if context > 1 else ""
        raise ValueError(
            f"batch_size must be a multiple of {rows} "
            f"(data.micro_batch_size={micro_batch_size} * {world_size} processes{shared}); got {batch_size}"
        )
    return steps


def require_trained_weights(optimizer: str, precision: str, *, has_adapters: bool) -> None:
    """Checks that the optimizer supports the dtype of the weights that the run trains.

    Raises: ValueError if the optimizer needs bf16 weights, and the run trains weights of another dtype.
    """
    if optimizer not in ("adamw_bf16", "adamw_master"):
        return
    if has_adapters:
        raise ValueError(f"optimizer={optimizer} cannot train adapters, which are fp32; choose optimizer=adamw")
    if precision != "bf16-true":
        raise ValueError(f"optimizer={optimizer} needs trainer.precision=bf16-true; got {precision}")


def require_shardable(optimizer: str, *, quantized: bool) -> None:
    """Checks that strategy=fsdp supports the run. quantized: whether weights have 4 bits.

    Raises: ValueError if the run has 4-bit weights, or an optimizer that strategy=fsdp does not support.
    """
    if quantized:
        raise ValueError("strategy=fsdp cannot shard 4-bit weights; got adapter=qlora. Choose adapter=lora")
    if optimizer in ("adamw_8bit", "adamw_offload"):
        raise ValueError(
            "strategy=fsdp needs optimizer=adamw, or optimizer=adamw_master or adamw_bf16 with "
            f"trainer.precision=bf16-true; got {optimizer}"
        )


def require_head_groups(groups: int, context: int, attention: str) -> None:
    """Raises: ValueError if the run does not support strategy.head_groups.

    If strategy.head_groups is above 1, attention must be flash, and strategy.context must be above 1.
    attention: the name of the chosen option of conf/attention.
    """
    if groups > 1 and (context == 1 or attention != "flash"):
        raise ValueError(
            f"strategy.head_groups={groups} needs attention=flash and strategy.context of at least 2; got "
            f"attention={attention} and strategy.context={context}"
        )


def require_logger(logger: Any) -> None:
    """Raises: ValueError if trainer.logger, or an item of its list, is a text or a mapping without `_target_`.

    The key `logger` chooses an option of conf/logger, but trainer.logger does not. Lightning would use the keys of a
    mapping as loggers.
    """
    for one in logger if isinstance(logger, list) else [logger]:
        if isinstance(one, str) or (isinstance(one, Mapping) and "_target_" not in one):
            raise ValueError(
                "trainer.logger must be a config with _target_, a list of them, true, false or null; got "
                f"{shown(one)}. To choose an option of conf/logger, set logger, such as logger=csv"
            )


def require_no_upload(logger: Any) -> None:
    """Raises: ValueError if W&B must upload checkpoints of strategy=fsdp.

    Lightning uploads only checkpoints that are files, and checkpoints of strategy=fsdp are folders.
    logger: the config of the logger, which may be true, false or null.
    """
    log_model = logger.get("log_model") if isinstance(logger, Mapping) else None
    if log_model:
        raise ValueError(
            f"logger.log_model must be false with strategy=fsdp, whose checkpoints are folders; got {shown(log_model)}"
        )


def require_device_count(devices: Any, accelerator: str) -> None:
    """Raises: ValueError if trainer.devices chooses GPUs (by -1 or a list), but the run is on the CPU."""
    chooses_gpus = devices == -1 or isinstance(devices, list)
    if chooses_gpus and is_on_cpu(accelerator):
        raise ValueError(
            f"trainer.devices={devices} needs a GPU; got a run on the CPU. Choose a number of processes, or auto"
        )


def require_world_size(trainer: Mapping[str, Any], world_size: int) -> None:
    """Raises: ValueError if torchrun or srun has started more or fewer ranks than the run has devices.

    trainer: the node `trainer` of a config.
    """
    devices, nodes = devices_per_node(trainer), trainer.get("num_nodes", 1)
    if devices * nodes != world_size:
        raise ValueError(
            f"trainer.devices * trainer.num_nodes must be {world_size}, the number of ranks that torchrun or srun has "
            f"started; got {devices} * {nodes}"
        )


def require_cuda(optimizer: str, accelerator: str) -> None:
    """Raises: ValueError if the run is on the CPU.

    optimizer: the name of an optimizer that needs a CUDA GPU. accelerator: trainer.accelerator.
    """
    if is_on_cpu(accelerator):
        found = "" if accelerator == "cpu" else " on a machine without a CUDA GPU"
        raise ValueError(f"optimizer={optimizer} needs a CUDA GPU; got trainer.accelerator={accelerator}{found}")


def is_on_cpu(accelerator: str) -> bool:
    """Returns whether trainer.accelerator puts the run on the CPU.

    With accelerator=gpu or cuda, Lightning itself checks that there is a GPU.
    """
    return accelerator == "cpu" or (accelerator == "auto" and not has_gpu())


def require_float8_settings(precision: str, *, sharded: bool, compiled: bool) -> None:
    """Raises: ValueError if the strategy, the compile mode or the precision does not support lit_gpt.float8."""
    if sharded:
        raise ValueError("lit_gpt.float8 needs strategy=auto or ddp; got fsdp")
    if not compiled:
        raise ValueError("lit_gpt.float8 needs lit_gpt.compile_model=true; got false")
    if precision == "32-true":
        raise ValueError("lit_gpt.float8 needs trainer.precision=bf16-mixed or bf16-true; got 32-true")
