"""Records in the logs that memory ran out."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from fa_train.bounds import PositiveInt
from fa_train.callbacks.monitor import memory, monitor_of
from fa_train.memory.planner.predict import GIB
from fa_train.memory.planner.run import OUTSIDE_TORCH, bytes_of_others, device_bytes
from fa_train.parallel.fsdp import FullyShardedStrategy

REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG])iB")  # in the message of torch.OutOfMemoryError
IN_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0}
OF_GPU = re.compile("cuda|cublas|nccl", re.IGNORECASE)  # errors of the GPU, but not those of the CPU allocator
# parts of the messages of RuntimeErrors that say that memory ran out
OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")


class OutOfMemory(Callback):
    """If memory runs out, logs oom=1 and prints one line that suggests other settings.

    attention and memory: the names of the chosen options of conf/attention and conf/memory.
    """

    def __init__(
        self, seq_len: PositiveInt, micro_batch_size: PositiveInt, attention: str, memory: str = "default"
    ) -> None:
        self.seq_len, self.micro_batch_size = seq_len, micro_batch_size
        self.attention, self.memory = attention, memory
        self.advised = "out of memory"

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        device, used = pl_module.device, memory(pl_module.device)
        monitor_of(trainer).latest |= used | {"oom": 1}
        for logger in trainer.loggers:
            logger.log_metrics({"oom": 1}, step=trainer.global_step)
        message = f"{exception} {exception.__cause__}"
        usage, needed = f"peak use {used['perf/peak_gib']:.1f} GiB", used.get("perf/reserved_gib", 0.0)
        if requested := REQUESTED.search(message):
            usage += f"; the failed allocation needed {requested[1]} {requested[2]}iB"
            needed += float(requested[1]) * IN_GIB[requested[2]]
        limit, total = f"the device has ({usage})", device_bytes(device)
        if others := bytes_of_others(device):
            limit = f"is free ({usage}; other processes use {others / GIB:.1f} GiB of the device)"
        elif OF_GPU.search(message) and needed * GIB + OUTSIDE_TORCH < total:
            limit = f"was free ({usage}; the device has {total / GIB:.1f} GiB; other processes probably used the rest)"
        self.advised = (
            f"out of memory: {self._settings} needs more memory than {limit}. Try {self._changes(trainer, device)}"
        )
        if trainer.world_size == 1:  # with several ranks, the launcher prints the error
            print(f"error: {self.advised}", file=sys.stderr)

    @property
    def _settings(self) -> str:
        return (
            f"seq_len={self.seq_len} with attention={self.attention} and data.micro_batch_size={self.micro_batch_size}"
        )

    def _changes(self, trainer: L.Trainer, device: torch.device) -> str:
        """Returns the changes of settings that can make the run fit."""
        strategy = trainer.strategy
        changes = [] if self.attention == "flash" else ["attention=flash"]
        if isinstance(strategy, FullyShardedStrategy) and strategy.reshard_after_forward is False:
            changes += ["strategy.reshard_after_forward=true"]  # the gathered weights of all blocks were kept
        if self.attention == "flash" and self.memory != "auto" and device.type == "cuda":
            changes += ["memory=auto"]
        changes += [f"data.micro_batch_size={self.micro_batch_size // 2}"] if self.micro_batch_size > 1 else []
        return ", ".join([*changes, "or a smaller seq_len or model" if changes else "a smaller seq_len or model"])


@contextmanager
def model_must_fit() -> Iterator[None]:
    """A context for building a run. Raises: ValueError instead of an out-of-memory error.

    The planner may have accepted the run, because its check ignores the memory that other processes use.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reported = str(error).partition("\n")[0].partition(" Of the allocated memory")[0]
        hint = ". Other processes may use the GPU; `nvidia-smi` lists them" if torch.cuda.is_available() else ""
        raise ValueError(
            f"memory ran out while the model and its data were built: {reported.rstrip('.') or 'out of memory'}{hint}"
        ) from error


def out_of_memory_advice(trainer: L.Trainer) -> str:
    """Returns "out of memory", followed by the advice of the callback OutOfMemory if the run has this callback."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((x.advised for x in callbacks if isinstance(x, OutOfMemory)), "out of memory")


def is_out_of_memory(exception: BaseException) -> bool:
    """Returns whether the exception or its cause says that the GPU or the host ran out of memory.

    Only torch's allocator of GPU memory raises torch.OutOfMemoryError. CUDA, cuBLAS, NCCL and Triton need GPU memory
    outside this allocator, and report its lack in a RuntimeError. So does torch if host memory runs out.
    """
    if exception.__cause__ is not None and is_out_of_memory(exception.__cause__):
        return True
    if isinstance(exception, OSError):
        return exception.errno == errno.ENOMEM  # from mmap or fork
    if isinstance(exception, RuntimeError):
        return isinstance(exception, torch.OutOfMemoryError) or any(
            text in str(exception) for text in OUT_OF_MEMORY_TEXTS
        )
    return isinstance(exception, MemoryError)
