"""What must hold before a run starts. Each failure is a ValueError that says what was wanted and what came."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from fa_train.checkpoints.files import SUFFIX, CheckpointError, newest
from fa_train.memory.offload import available_host_bytes, require_host_memory
from fa_train.memory.planner.levers import Levers, fastest_that_fits, longest_of_all_levers, longest_seq_len, next_lever
from fa_train.memory.planner.plan import COMPONENTS, GIB, Prediction, predict
from fa_train.memory.planner.shape import Adapters, OptimizerKind, Precision, Shape
from fa_train.memory.planner.weights import parameter_sizes, trained_sizes
from fa_train.models.gpt import GPT
from fa_train.models.lora import adapted
from fa_train.models.rope import DynamicNTKScaling
from fa_train.optim import adamw
from fa_train.parallel.sharded_checkpoint import global_step, require_whole
from fa_train.settings import unknown_key

CERTAIN = 1.1  # times what a device has: the prediction is less wrong than that
OPTIMIZERS: dict[object, OptimizerKind] = {
    adamw.adamw: "adamw",
    adamw.adamw_8bit: "adamw_8bit",
    adamw.adamw_bf16: "adamw_bf16",
    adamw.adamw_offload: "adamw_offload",
}


class DoesNotFitError(ValueError):
    """The planner expects a step to run out of a GPU's memory."""


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


def shape_of(
    model: GPT,
    *,
    precision: str,
    tokens: int,
    optimizer: Callable[[nn.Module], Optimizer],
    accumulates: bool,
    compiled: bool,
    ranks: int = 1,
) -> Shape:
    """The planner's numbers of a model, which may be on the meta device; the rest as in Shape.

    What single families of checkpoints add (fa_train.models.config.Family) is not counted, and an unknown optimizer
    counts as AdamW. Raises: ValueError on an unknown precision.
    """
    config, memory = model.config, model.memory
    return Shape(
        n_layers=config.n_layers,
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.heads.kv,
        head_dim=config.heads.dim,
        ffn_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
        activation=config.activation,
        tied=config.tied,
        norm="layernorm" if config.norm == "layernorm" else "rmsnorm",
        qk_norm=config.qk_norm,
        bias=config.ffn_bias,
        rope=config.positions == "rope",
        learned_positions=(config.max_seq_len or 0) if config.positions == "learned" else 0,
        precision=cast(Precision, precision),  # which Shape checks
        tokens=tokens,
        checkpointing=memory.checkpointing,
        offload=memory.offload,
        mlp_chunk=memory.mlp_chunk,
        loss_chunk=model.loss.chunk_size,
        optimizer=OPTIMIZERS.get(optimizer.func if isinstance(optimizer, partial) else optimizer, "adamw"),
        accumulates=accumulates,
        compiled=compiled,
        adapters=adapters_of(model),
        ranks=ranks,
    )


def require_shardable(shape: Shape, *, samples: bool) -> None:
    """ValueError where strategy=fsdp has nothing to shard on, or a part of the run cannot be sharded.

    samples: whether callbacks.sample asks rank 0 alone for answers, which then waits for the others' weights.
    """
    if shape.ranks == 1:
        raise ValueError(
            "strategy=fsdp must have at least 2 devices; got 1. Choose strategy=auto, or trainer.devices=2"
        )
    if shape.adapters is not None and shape.adapters.quantised:
        raise ValueError("strategy=fsdp cannot shard weights in 4 bits; got adapter=qlora. Choose adapter=lora")
    if shape.optimizer in ("adamw_8bit", "adamw_offload"):
        raise ValueError(
            "strategy=fsdp must have optimizer=adamw, or adamw_bf16 with trainer.precision=bf16-true: it shards their "
            f"states itself; got {shape.optimizer}"
        )
    if samples:
        raise ValueError("strategy=fsdp must have callbacks.sample=null: rank 0 has a part of the weights; got one")


def adapters_of(model: GPT) -> Adapters | None:
    """The planner's numbers of LoRA; a block's are those of the block that has most. None where there is none."""
    sizes, quantised = [], False
    numbers: dict[tuple[str, str], list[int]] = {}  # rank and joined elements, by block and part
    for path, linear in adapted(model):
        _, block, part, _ = path.split(".")
        quantised |= bool(linear.nf4)
        sizes += [p.numel() for p in (*linear.lora_A.values(), *linear.lora_B.values())]
        rank = sum(a.shape[0] for a in linear.lora_A.values())
        so_far = numbers.setdefault((block, part), [0, 0])
        so_far[0] += rank
        so_far[1] += rank * (linear.in_features + linear.out_features)
    if not numbers:
        return None
    attention, ffn = (
        [max((values[i] for (_, part), values in numbers.items() if part == wanted), default=0) for i in (0, 1)]
        for wanted in ("attention", "ffn")
    )
    return Adapters(tuple(sizes), attention[0], ffn[0], attention[1], ffn[1], quantised)


def device_bytes(device: torch.device) -> int:
    """All that a GPU has, or the machine where the CPU trains."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fastest_levers(shape: Shape, device: torch.device, processes: int, rows: int) -> Levers:
    """What memory=auto stands for here; on the CPU, where the levers gain nothing, none of them.

    processes: that share this machine's memory; rows: data.micro_batch_size.
    Raises: ValueError where no combination fits.
    """
    if device.type != "cuda":
        return Levers("none", False, None)
    gpu, host = device_bytes(device), available_host_bytes() // processes
    levers = fastest_that_fits(shape, gpu, host)
    if levers is None:
        raise ValueError(
            f"memory=auto found no levers under which this run fits into {gpu / GIB:.1f} GiB of {device} and "
            f"{host / GIB:.1f} GiB of host memory. Try {next_lever(shape, gpu, host, rows)}"
        )
    return levers


def require_memory(shape: Shape, device: torch.device, processes: int, rows: int) -> Prediction:
    """The planner's prediction; ValueError where it does not fit, of the GPU's memory with a tenth to spare.

    That last one is a DoesNotFitError.

    On the CPU only weights, gradients and the optimizer's states count.
    processes: that share this machine's memory; rows: data.micro_batch_size.
    """
    prediction, available = predict(shape), device_bytes(device)
    parameters = sum(parameter_sizes(shape))
    needed = prediction.weights + prediction.optimizer + sum(trained_sizes(shape)) * shape.gradient_bytes // shape.ranks
    if needed > available:
        raise ValueError(
            f"{parameters / 1e9:.2f}B parameters need {needed / GIB:.1f} GiB for weights, gradients and the "
            f"optimizer's states; {device} has {available / GIB:.1f} GiB. Choose a smaller model"
        )
    if device.type != "cuda":
        return prediction
    host = available_host_bytes()
    if prediction.gpu_bytes > CERTAIN * available:
        raise DoesNotFitError(
            f"a step needs about {prediction.gpu_bytes / GIB:.1f} GiB of GPU memory; {device} has "
            f"{available / GIB:.1f} GiB. Try {next_lever(shape, available, host // processes, rows)}"
        )
    if shape.offload:
        require_host_memory(prediction.host, host, processes, everything=shape.everything)
    elif prediction.host * processes > host:
        raise ValueError(
            f"optimizer=adamw_offload needs {prediction.host / GIB:.1f} GiB of host memory in each of {processes} "
            f"processes; {host / GIB:.1f} GiB are available. Choose optimizer=adamw_8bit or a smaller model"
        )
    return prediction


def plan(
    prediction: Prediction, device: torch.device, processes: int, rows: int, attention: str, auto: bool = False
) -> str:
    """What a run on a GPU prints before it starts, in three lines; rows: data.micro_batch_size.

    The planner knows what flash needs; another attention takes memory of its own beside that.
    auto: the longest seq_len is under the levers that reach farthest, not under the run's own.
    """
    gpu, host = device_bytes(device), available_host_bytes() // processes
    parts = {name.replace("_", " "): getattr(prediction, name) / GIB for name in COMPONENTS}
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
    longest = (longest_of_all_levers if auto else longest_seq_len)(prediction.shape, gpu, host) // rows
    change = next_lever(prediction.shape, gpu, host, rows)
    if attention == "flash":
        length = f"the longest seq_len that fits is {longest:,}" + (
            f"; this one may not. Try {change}" if change else ""
        )
    else:
        length = (
            f"attention={attention} takes more, which is not planned; with flash {longest:,} is the longest seq_len"
        )
    return (
        f"planned: {prediction.gpu_bytes / GIB:.1f} of {gpu / GIB:.1f} GiB, most at {prediction.moment}\n"
        f"  GiB: {listed}; on the host {prediction.host / GIB:.1f} of {host / GIB:.1f}\n"
        f"  {length}"
    )


def checkpoint_path(ckpt_path: str | None, runs: Path, say: Callable[[str], object] = print) -> str | None:
    """`ckpt_path` itself, or for `last` the newest intact checkpoint below the folder `runs`.

    say: called with a line for each damaged checkpoint that `last` skips.
    Raises: ValueError if the checkpoint does not exist, is damaged or is not a checkpoint.
    """
    if ckpt_path is None:
        return None
    if ckpt_path != "last":
        if not Path(ckpt_path).exists():
            raise ValueError(f"ckpt_path must be a checkpoint or `last`; {ckpt_path} does not exist")
        require_whole(Path(ckpt_path))
        return ckpt_path
    found = newest(runs.glob(f"**/*{SUFFIX}"))
    for path in found:
        try:
            require_whole(path)
        except CheckpointError as error:
            say(f"ckpt_path=last skips a checkpoint: {error}")
        else:
            return str(path)
    if found:
        raise ValueError(f"ckpt_path=last found no whole checkpoint among {len(found)} below {runs}")
    raise ValueError(f"ckpt_path=last found no checkpoint below {runs}; run_name chooses the folder")


def finished(ckpt_path: str | None, max_steps: int) -> str | None:
    """None if a run from this checkpoint has steps left to do, otherwise a line that says why it has none."""
    done = global_step(Path(ckpt_path)) if ckpt_path else 0
    if done < max_steps:
        return None
    return f"nothing to do: {ckpt_path} has done {done} of max_steps={max_steps} steps. Increase max_steps to go on"


def machine() -> str:
    """What a preset is chosen by."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a CUDA GPU"


def explain(error: BaseException) -> str:
    """In one line, the ValueError that Hydra wrapped, or what Hydra itself found wrong."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    unknown = next((link for link in chain if getattr(link, "parent_node", None) and "in struct" in str(link)), None)
    if unknown is not None:  # OmegaConf's error if an override names a key that the config does not have
        text = unknown_key(vars(unknown)["full_key"], vars(unknown)["parent_node"])
        return text if unknown is error else f"{text} (a + before it adds a parameter that conf/ does not list)"
    said = next((link for link in chain if isinstance(link, ValueError)), error)
    text = str(said).partition("Config search path")[0].partition("full_key")[0]  # where Hydra looked
    return " ".join(text.removeprefix("ValueError raised while resolving interpolation: ").split())
