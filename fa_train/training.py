"""One run of train.py. Builds the trainer, the model and the data from a checked config, and trains."""

import gc
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from fa_train import early_checks, preflight
from fa_train.callbacks.checkpoint import export_finished, export_last, require_checkpoint, require_folder
from fa_train.callbacks.monitor import monitor_of, require_measured
from fa_train.callbacks.out_of_memory import model_must_fit
from fa_train.callbacks.record import closed_on_error, keep_earlier_metrics, log_config, require_folders
from fa_train.checkpoints import resume
from fa_train.data.datamodule import NOTHING_HELD_OUT, PackedDataModule
from fa_train.fit import fit
from fa_train.lit_gpt import LitGPT
from fa_train.memory.planner.run import plan_memory
from fa_train.models.attention import require_backend
from fa_train.models.float8 import require_float8_gpu
from fa_train.models.gpt import GPT
from fa_train.optim.adamw import require_trainable
from fa_train.optim.schedule import unfinished_warmup
from fa_train.parallel import communication
from fa_train.parallel.decisions import decided_by_rank_zero
from fa_train.parallel.fsdp import FullyShardedStrategy, context_ranks, require_no_averaging
from fa_train.parallel.sharded_checkpoint import CheckpointFiles
from fa_train.private_names import private
from fa_train.run_config import in_sweep, to_container
from fa_train.silence import silence_libraries

SHARDING = ("replicas", "reshard_after_forward", "reduce_once", "context", "head_groups")  # settings of strategy=fsdp

silence_libraries()


def train(cfg: DictConfig) -> dict[str, float]:
    """Trains one run. Returns the run's last metrics.

    If memory ran out in a run of one rank, the metrics include oom=1.
    Raises: OutOfMemoryError if memory ran out in a run of several ranks.
    """
    if in_sweep():
        forget_earlier_jobs()
    with model_must_fit():
        trainer, lit_gpt, data = build(cfg)
    if cfg.export:
        require_checkpoint(trainer)
        from fa_train.models.hf.export import require_exportable  # the import takes time, and few runs need it

        require_exportable(lit_gpt.model, cfg.seq_len)
    newest = partial(resume.checkpoint_path, cfg.ckpt_path, resume.runs_folder(cfg.run_name))
    ckpt_path = decided_by_rank_zero("ckpt_path", newest)
    done = decided_by_rank_zero("steps", partial(resume.steps_done, ckpt_path, lit_gpt.model))
    config, rebuild = to_container(cfg), partial(rebuild_model, cfg)
    if done >= cfg.max_steps:  # `done` is at least 1 here, so there is a checkpoint
        trainer.print(
            f"nothing to do: {ckpt_path} has done {done} of max_steps={cfg.max_steps} steps. "
            "Increase max_steps to continue"
        )
        if cfg.export:
            export_finished(trainer, Path(ckpt_path), rebuild, config)
        return monitor_of(trainer).summary()
    machine = preflight.machine(trainer.strategy.root_device)
    trainer.print(f"preset={cfg.choices.preset} on {machine}, run in {trainer.default_root_dir}")
    if ckpt_path is not None:
        trainer.print(f"resuming from {ckpt_path} after step {done}")
    if isinstance(cfg.scheduler.get("warmup_steps"), int) and "lr" in cfg.optimizer:
        warning = unfinished_warmup(
            warmup_steps=cfg.scheduler.warmup_steps, max_steps=cfg.max_steps, lr=cfg.optimizer.lr
        )
        if warning is not None:
            trainer.print(warning)
    require_measured(cfg.optimized_metric, trainer)
    require_validation(cfg, trainer, data, done)
    decided_by_rank_zero("checkpoints", partial(require_folder, trainer))
    decided_by_rank_zero("loggers", partial(require_folders, trainer))
    keep_earlier_metrics(trainer)
    with closed_on_error(trainer):
        for logger in trainer.loggers:
            log_config(logger, config)
        has_memory = fit(trainer, lit_gpt, data, ckpt_path)
    if has_memory and cfg.export:
        if trainer.global_step == done and ckpt_path is not None:  # no step was trained, for example due to max_time
            export_finished(trainer, Path(ckpt_path), rebuild, config)
        else:
            export_last(trainer, rebuild, config)
    return monitor_of(trainer).summary()


def forget_earlier_jobs() -> None:
    """Frees memory and compiled code of the earlier jobs of a sweep, so that a job runs like a single run.

    Without this function, torch.compile would use slower code with dynamic shapes if a shape differs from that of an
    earlier job. After 8 compilations of a block, torch.compile would run the block in eager mode.
    """
    gc.collect()  # an earlier job may have left reference cycles that hold GPU memory or pinned host memory
    if "torch._dynamo" in sys.modules:  # the import takes seconds
        torch.compiler.reset()


def build(cfg: DictConfig) -> tuple[L.Trainer, LitGPT, L.LightningDataModule]:
    """Builds the trainer, the model and the data of a run. Raises: ValueError if the run cannot train.

    The order matters: the data determine the size of the vocabulary, and the trainer determines the device and the
    number of ranks. `fill_in_levers` plans the run's memory from these values, and writes its choices to `cfg`. The
    model is built last, because the choices in `cfg` determine which modules it has.
    cfg: a config that fa_train.run_config.check has checked.
    """
    L.seed_everything(cfg.seed, verbose=False)
    # Check model.pretrained before the data are built, because data.tokenizer often has the same value.
    if cfg.model.get("pretrained") is not None:
        from fa_train.models.hf.import_ import require_checkpoint  # the import takes a second

        require_checkpoint(cfg.model.pretrained)
    nodes = instantiate(cfg.callbacks, _convert_="all")  # Lightning's callbacks need Python's dicts, not OmegaConf's
    callbacks = [callback for callback in nodes.values() if callback is not None]
    data = instantiate(cfg.data)
    # `dir` does not call properties, which could raise errors
    if missing := [name for name in ("vocab_size", "accumulation") if name not in dir(data)]:
        raise ValueError(f"data must be a PackedDataModule; got a {type(data).__name__}, which has no {missing[0]}")
    given: dict[str, Any] = {"callbacks": callbacks, "plugins": [CheckpointFiles()]}
    # without such a callback, Lightning would add its own
    for key, kind in (("enable_checkpointing", CheckpointCallback), ("enable_progress_bar", ProgressBar)):
        if cfg.trainer.get(key) is None and not any(isinstance(callback, kind) for callback in callbacks):
            given[key] = False
    trainer = instantiate(cfg.trainer, **given)
    if trainer.world_size == 1:
        # A cluster may set RANK=1 also for a run of one process. Lightning reads RANK, and rank 1 logs nothing.
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            correct_wandb_arguments(logger, has_resume="resume" in cfg.trainer.logger)
    communication.configure(trainer, has_timeout="timeout" in cfg.strategy)
    require_no_averaging(trainer)
    early_checks.require_groups(trainer.world_size, context_ranks(trainer.strategy))
    trainer.accumulate_grad_batches = data.accumulation(trainer.world_size, context_ranks(trainer.strategy))
    trainer.val_check_interval *= trainer.accumulate_grad_batches  # Lightning counts micro-batches, not steps
    dtype = torch.float32 if cfg.trainer.precision == "32-true" else torch.bfloat16
    require_backend(instantiate(cfg.attention), trainer.strategy.root_device, dtype)
    # a checkpoint may have no embeddings for some added tokens of its tokenizer
    tokens = getattr(data, "min_vocab_size", data.vocab_size) if "pretrained" in cfg.model else data.vocab_size
    vocab_size = cfg.model.vocab_size or tokens
    preflight.require_vocabulary(vocab_size, tokens)
    fill_in_levers(cfg, trainer, vocab_size)
    if cfg.get("epochs") is not None:
        fill_in_steps(cfg, trainer, data)
    sharded, device = isinstance(trainer.strategy, FullyShardedStrategy), trainer.strategy.root_device
    with torch.device("meta") if sharded else device:  # LitGPT.configure_model allocates a sharded model
        model = build_model(cfg, vocab_size)
    if cfg.choices.adapter != "none" and cfg.model.get("pretrained") is None:
        trainer.print(
            f"warning: adapter={cfg.choices.adapter} freezes the model's weights, which are random. To train an "
            "adapter of a checkpoint, set model=pretrained and model.pretrained"
        )
    # OmegaConf's lists are converted: an optimizer may store them, and a checkpoint with such lists cannot be read
    return trainer, instantiate(cfg.lit_gpt, model=model, _convert_="all"), data


def build_model(cfg: DictConfig, vocab_size: int) -> GPT:
    """Builds the model and its adapter on torch's default device."""
    model: GPT = instantiate(cfg.adapter)(instantiate(cfg.model, vocab_size=vocab_size))
    return model


def rebuild_model(cfg: DictConfig, vocab_size: int) -> GPT:
    """Builds the model again, with the same initial weights."""
    L.seed_everything(cfg.seed, verbose=False)
    return build_model(cfg, vocab_size)


def fill_in_levers(cfg: DictConfig, trainer: L.Trainer, vocab_size: int) -> None:
    """Checks that the run fits in memory, and chooses the settings that the config leaves to the memory planner.

    With memory=auto, writes the chosen memory levers to `cfg`. Memory levers are settings that reduce GPU memory
    (fa_train.memory.memory.Levers). With strategy.reshard_after_forward=auto, writes true or false as the value of
    reshard_after_forward to `cfg` and to the trainer's strategy.

    Raises: ValueError if the run does not fit in memory, its sequences are too long for the model, or it would train
    fp16 weights.
    """
    with torch.device("meta"):  # sizes only, no weights
        model = build_model(cfg, vocab_size)
    if str(trainer.precision) != "bf16-true":  # Lightning converts all weights to bf16
        require_trainable(model, has_stored_dtype=cfg.model.get("dtype") is None)
    preflight.require_reach(model, cfg.seq_len, cfg.data.max_doc_len, cfg.data.reset_positions)
    if cfg.model.vocab_size is None:
        preflight.require_tokenizer(model, cfg.choices.data, cfg.data)
    config = {str(key): value for key, value in cfg.items()}
    if isinstance(trainer.strategy, FullyShardedStrategy):  # a user's subclass may change these settings
        config["strategy"] = dict(cfg.strategy) | {name: getattr(trainer.strategy, name) for name in SHARDING}
    plan = preflight.plan_of(config, model, instantiate(cfg.optimizer), trainer.world_size)
    if plan.run.float8:
        require_float8_gpu(trainer.strategy.root_device)
    plan = plan_memory(
        plan,
        trainer.strategy.root_device,
        trainer.num_devices,
        auto=bool(cfg.memory.get("auto")),
        auto_reshard=preflight.chooses_reshard(cfg.strategy, cfg.choices.attention),
        attention=cfg.choices.attention,
        reach=preflight.longest_row(model, cfg.data.max_doc_len, cfg.data.reset_positions),
        in_sweep=in_sweep(),
        say=trainer.print,
    )
    if cfg.memory.get("auto"):
        cfg.memory.update(asdict(plan.levers))
    if isinstance(trainer.strategy, FullyShardedStrategy):
        trainer.strategy.reshard_after_forward = cfg.strategy.reshard_after_forward = plan.run.reshard_after_forward


def fill_in_steps(cfg: DictConfig, trainer: L.Trainer, data: L.LightningDataModule) -> None:
    """Computes how many steps cfg.epochs needs. Writes the number of steps to config, trainer and data.

    Every rank calls this function before the ranks can communicate. One rank tokenises the data, and the others wait
    until the tokens are in the cache.
    Raises: ValueError if the data are a mixture, or the data module is not a PackedDataModule.
    """
    if not isinstance(data, PackedDataModule):
        raise ValueError(f"epochs needs a PackedDataModule; got a {type(data).__name__}. Set max_steps instead")
    steps = data.steps_of(cfg.epochs)
    early_checks.require_64_bits(cfg.seq_len, steps, cfg.batch_size)
    cfg.max_steps = data.max_steps = trainer.fit_loop.epoch_loop.max_steps = steps


def correct_wandb_arguments(logger: WandbLogger, *, has_resume: bool) -> None:
    """Corrects the arguments that Lightning passes to wandb.init. has_resume: whether the config has logger.resume."""
    arguments = private("lightning", logger, "_wandb_init")
    arguments.pop("anonymous", None)  # wandb warns that `anonymous` has no effect
    if private("lightning", logger, "_offline"):  # otherwise, logger.mode would override logger.offline
        arguments["mode"] = "offline"
    if "WANDB_RESUME" in os.environ and arguments["resume"] == "allow" and not has_resume:
        arguments.pop("resume")  # otherwise, Lightning's default `allow` would override WANDB_RESUME


def require_validation(cfg: DictConfig, trainer: L.Trainer, data: L.LightningDataModule, done: int) -> None:
    """Prints a line if the run has no validation, or raises an error if optimized_metric needs a validation.

    If optimized_metric is a validation metric, the function tokenises the data that are not yet in the cache, to find
    out whether any data are held out. With any other optimized_metric, the function does not read the data. If no data
    are held out, the data module prints a line when it creates the validation dataloader.
    done: the number of optimizer steps in the checkpoint that the run resumes, or 0 for a new run.
    Raises: ValueError if optimized_metric needs a validation, but the run has none.
    """
    is_optimized = str(cfg.optimized_metric).startswith("val/")
    message = without_validation(
        done,
        cfg.max_steps,
        cfg.trainer.val_check_interval,
        val_rows=getattr(data, "val_rows", None),
        limit_val_batches=trainer.limit_val_batches,
    )
    if message is None and is_optimized and isinstance(data, PackedDataModule) and not data.holds_out():
        message = NOTHING_HELD_OUT
    if message is None:
        return
    if is_optimized:
        raise ValueError(f"optimized_metric={cfg.optimized_metric} needs a validation; {message}")
    useless = ". keep_best has no effect" if getattr(trainer.checkpoint_callback, "keep_best", False) else ""
    trainer.print(message + useless)


def without_validation(
    done: int, max_steps: int, val_check_interval: int, *, val_rows: int | None, limit_val_batches: float | None
) -> str | None:
    """Returns a message if a run has no validation, and otherwise None.

    done: the number of optimizer steps in the checkpoint that the run resumes, or 0 for a new run.
    val_rows, limit_val_batches: data.val_rows and trainer.limit_val_batches. None means no limit.
    """
    for name, limit in (("data.val_rows", val_rows), ("trainer.limit_val_batches", limit_val_batches)):
        if limit == 0:
            return f"no validation: {name} is 0"
    if done // val_check_interval < max_steps // val_check_interval:
        return None
    if max_steps < val_check_interval:
        return f"no validation: max_steps={max_steps} is below trainer.val_check_interval={val_check_interval}"
    return (
        f"no validation: none of the steps {done + 1} to {max_steps} is a multiple of "
        f"trainer.val_check_interval={val_check_interval}"
    )
