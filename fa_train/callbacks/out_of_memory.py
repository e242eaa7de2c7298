"""Records in the logs that memory ran out."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from fa_train.bounds import PositiveInt
from fa_train.callbacks.monitor import memory, monitor_of
from fa_train.memory.planner.predict import GIB
from fa_train.memory.planner.run import bytes_of_others
from fa_train.parallel.fsdp import FullyShardedStrategy


class OutOfMemory(Callback):
    """If memory runs out, logs oom=1 and prints one line that suggests other settings."""

    def __init__(self, seq_len: PositiveInt, micro_batch_size: PositiveInt, attention: str) -> None:
        self.seq_len, self.micro_batch_size, self.attention = seq_len, micro_batch_size, attention
        self.advised = "out of memory"

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        monitor_of(trainer).latest |= memory(pl_module.device) | {"oom": 1}
        for logger in trainer.loggers:
            logger.log_metrics({"oom": 1}, step=trainer.global_step)
        strategy = trainer.strategy
        gathered = isinstance(strategy, FullyShardedStrategy) and strategy.reshard_after_forward is False
        peak, others = memory(pl_module.device)["perf/peak_gib"], bytes_of_others(pl_module.device) / GIB
        self.advised = f"out of memory: {self.advice(peak, gathered, others)}"
        if trainer.world_size == 1:  # with several ranks, the launcher prints the error
            print(f"error: {self.advised}", file=sys.stderr)

    def advice(self, peak_gib: float, gathered: bool = False, others_gib: float = 0.0) -> str:
        """Returns a message that names the settings that did not fit in memory, and suggests changes.

        gathered: whether fsdp kept the gathered weights of all blocks between forward and backward.
        others_gib: the GPU memory that other processes use.
        """
        changes = [] if self.attention == "flash" else ["attention=flash"]
        changes += ["strategy.reshard_after_forward=true"] if gathered else []
        changes += [f"data.micro_batch_size={self.micro_batch_size // 2}"] if self.micro_batch_size > 1 else []
        changes += ["or a smaller seq_len or model" if changes else "a smaller seq_len or model"]
        lack = f"the device has (peak {peak_gib:.1f} GiB)"
        if others_gib:
            lack = f"is free (peak {peak_gib:.1f} GiB; other processes use {others_gib:.1f} GiB of the device)"
        return (
            f"seq_len={self.seq_len} with attention={self.attention} and data.micro_batch_size={self.micro_batch_size}"
            f" needs more memory than {lack}. Try {', '.join(changes)}"
        )


def out_of_memory_advice(trainer: L.Trainer) -> str:
    """Returns "out of memory", followed by the advice of the callback OutOfMemory if the run has this callback."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((x.advised for x in callbacks if isinstance(x, OutOfMemory)), "out of memory")


def is_out_of_memory(exception: BaseException) -> bool:
    """Returns whether the exception says that the GPU or the host ran out of memory.

    If host memory runs out, torch raises a RuntimeError that names DefaultCPUAllocator.
    """
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(exception)
