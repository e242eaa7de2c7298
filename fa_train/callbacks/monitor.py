"""Measures a run: loss, gradient norm, learning rate, throughput, MFU, memory, and the differences between ranks."""

import gc
import math
import os
import re
import resource
import statistics
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from fa_train.bounds import PositiveInt
from fa_train.callbacks.communication import CommunicationTimer, Span, compare_ranks
from fa_train.callbacks.timestamp import Timestamp
from fa_train.checkpoints.architecture import difference
from fa_train.checkpoints.metrics import LOSSES, TOKENS, VAL_STEP
from fa_train.errors import DivergedError
from fa_train.flops import peak_flops, train_flops
from fa_train.lit_gpt import LitGPT
from fa_train.parallel.communication import host_group, timeout_of
from fa_train.parallel.fsdp import is_sharded
from fa_train.private_names import replace_private

GIB = 2**30
BATCH_SIZE = "batch_size"  # a checkpoint stores batch_size under this key
LR_TOLERANCE = 0.01  # a resumed run prints a warning if its learning rate differs from the checkpoint's by more than 1%
RECENT_LOGS = 1000  # the number of recent logs over which `summary` takes the median of tokens_per_s


@dataclass(frozen=True)
class Reading:
    """The measurements that Monitor logs together at one step. The device may still be computing `values`."""

    step: int
    steps: int  # the number of optimizer steps since the previous Reading, or since training started
    lr: float
    memory: dict[str, float]
    values: Tensor  # (5,) fp64 in host memory, from LitGPT; wait for `end` before reading
    start: Timestamp
    end: Timestamp
    validations: list[Span]  # between start and end
    waited: float  # seconds that the host waited for data, between start and end
    step_start: Timestamp | None  # the start of the logged step, or None in a run of one rank
    communication: list[Span]  # periods in which the device waited for other ranks, between step_start and end


class Monitor(Callback):
    """Logs loss, gradient norm, learning rate, throughput, MFU and memory every trainer.log_every_n_steps steps.

    Monitor moves all values of a logged step from the device to the host in a single copy. The host reads the copied
    values after it has launched the next micro-batch, so the device never waits for the host. For example, step 10 is
    logged and each step has one micro-batch:

        host   | launch step 10 | start the copy of its values | launch step 11 | read the values, log step 10
        device | ...            | step 10                      | copy           | step 11

    A log is pending until the host has read its values. A pending log is finished before a validation, before a
    checkpoint and at the end of a run. With several ranks, a log also needs one small collective, which does not use
    the GPUs. The last step of a run that stops early is logged without perf/*.
    `latest` holds the newest value of each metric. `latest_step` is the step of the newest log, and `of_latest_step`
    has the metrics of this step only. Every log contains `tokens`, the number of tokens that the model has been trained
    on. `tokens` and perf/tokens_per_s include padding. A checkpoint stores `tokens`, and a resumed run continues to
    count from the stored number. W&B uses `tokens` as its x-axis. The metrics perf/* cover the steps since the previous
    log, without validation. perf/mfu is missing if the device's peak FLOP/s are unknown. train/skipped_steps is the
    number of skipped optimizer steps (see LitGPT).
    max_skipped_steps: if this number of consecutive steps was skipped, Monitor ends the run at the next logged step.
    None sets no limit.
    perf/data_wait_ms is the time that the host waited for data. With several ranks, perf/communication_ms and
    perf/compute_ms cover the logged step alone. With several ranks, step_ms, data_wait_ms, communication_ms, compute_ms
    and host_gib are means over the ranks. <name>_max is the largest value among the ranks.
    Units: losses in nats per label, tokens_per_s over all devices, *_ms in milliseconds per step, *_gib in GiB.
    peak_gib and reserved_gib are measured on rank 0.
    Raises: ValueError if the trained module is not a LitGPT.
    """

    def __init__(self, seq_len: PositiveInt, batch_size: PositiveInt, max_skipped_steps: PositiveInt | None) -> None:
        self.batch_size, self.tokens_per_step = batch_size, seq_len * batch_size
        self.max_skipped_steps = max_skipped_steps
        self.latest: dict[str, float] = {}
        self.latest_step = 0
        self.of_latest_step: dict[str, float] = {}
        self.val_step: int | None = None  # the step of the newest val/loss
        self.has_diverged = False  # True if on_exception finds that the run has diverged
        self._rates: deque[float] = deque(maxlen=RECENT_LOGS)
        self._lr = 0.0
        self._checkpoint_lr: float | None = None  # the learning rate that the checkpoint stores for the next step
        self._resumed_step = self._resumed_tokens = 0  # the step and tokens of the checkpoint, or 0 in a new run
        self._window_start: Timestamp | None = None  # None until the first micro-batch
        self._window_pairs: Tensor | float = 0.0  # LitGPT.total_pairs at the last reading
        self._reading: Reading | None = None  # not logged yet
        self._validations: list[Span] = []  # since the last reading
        self._group: dist.ProcessGroup | None = None  # _group and _timer are None in a run of one rank
        self._timer: CommunicationTimer | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(pl_module, LitGPT):
            raise ValueError(f"the module that Monitor measures must be a LitGPT; got {type(pl_module).__name__}")
        gc.collect()  # an earlier run of a sweep may have left a reference cycle that holds GPU memory
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        forget_peak_of_host()
        if trainer.world_size > 1:
            self._group = host_group(timeout_of(trainer.strategy))
            self._timer = CommunicationTimer(pl_module.device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._window_step, self._window_pairs = trainer.global_step, 0.0
        self._window_start = None  # the time between two calls of trainer.fit is not training time
        self._validations.clear()
        lr, stored = float(trainer.optimizers[0].param_groups[0]["lr"]), self._checkpoint_lr
        if stored is not None and not math.isclose(lr, stored, rel_tol=LR_TOLERANCE):
            trainer.print(
                f"warning: the learning rate continues at {lr:.3g}; the checkpoint's was {stored:.3g}. The schedule "
                "follows this run's settings, such as max_steps and optimizer.lr"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._window_start is None:  # not in on_train_start, where Sample may use the device
            self._window_start, self._window_waited = Timestamp(pl_module.device), time_waited(trainer)
            # After a resume, the step that Lightning gives to loggers can be 1 too low or 1 too high. The step is
            # corrected here, because Lightning sets the step after on_train_start.
            replace_private("lightning", trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        if self._timer is not None and self._timer.start is None and is_logged(trainer, trainer.global_step + 1):
            assert isinstance(pl_module, LitGPT)
            self._timer.begin(pl_module, sharded=is_sharded(pl_module.model))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._timer is not None:
            self._timer.end_of_backward()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        # copy lr, because the scheduler changes lr (which may be a tensor) before the step is logged
        self._lr = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log_reading(trainer)
        steps = trainer.global_step - self._window_step
        if not steps or not is_logged(trainer, trainer.global_step):
            return
        assert isinstance(pl_module, LitGPT) and self._window_start is not None
        steps_skipped = [pl_module.skipped_steps, pl_module.longest_skip]
        pairs = pl_module.total_pairs - self._window_pairs
        measured = [pl_module.step_loss, pl_module.step_grad_norm, pairs, *steps_skipped]
        # the host does not wait for the copy, because the copy goes to pinned memory
        values = torch.stack([x.double() for x in measured]).to("cpu", non_blocking=True)
        end, waited = Timestamp(pl_module.device), time_waited(trainer)
        self._reading = Reading(
            step=trainer.global_step,
            steps=steps,
            lr=self._lr,
            memory=memory(pl_module.device),
            values=values,
            start=self._window_start,
            end=end,
            validations=self._validations.copy(),
            waited=waited - self._window_waited,
            step_start=self._timer.start if self._timer else None,  # read before end(), because end() resets `start`
            communication=self._timer.end() if self._timer else [],
        )
        self._window_start, self._window_step, self._window_waited = end, trainer.global_step, waited
        self._window_pairs = pl_module.total_pairs
        self._validations.clear()

    def log_reading(self, trainer: L.Trainer, *, together: bool = True) -> None:
        """Logs the values of a pending log, if there is one. First waits until the device has finished the logged step.

        together: whether all ranks call log_reading at the same point of the run. If `together` is false, ranks are not
        compared.
        Raises: DivergedError if max_skipped_steps or more consecutive steps were skipped.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return
        reading.end.wait()
        loss, grad_norm, pairs, skipped, longest_skip = reading.values.tolist()
        validation = sum(end.seconds_since(start) for start, end in reading.validations)
        seconds = (reading.end.seconds_since(reading.start) - validation) / reading.steps
        lit_gpt, device = trainer.lightning_module, trainer.strategy.root_device
        assert isinstance(lit_gpt, LitGPT)
        flops = train_flops(lit_gpt.model.config, reading.steps * self.tokens_per_step, pairs) / reading.steps
        self._rates.append(self.tokens_per_step / seconds)
        self.log_metrics(
            trainer,
            reading.step,
            {
                "train/loss": loss,
                "train/grad_norm": grad_norm,
                "train/skipped_steps": skipped,
                "lr": reading.lr,
                "perf/tokens_per_s": self._rates[-1],
                **self._of_ranks(reading, seconds, together),
                **utilisation(flops / seconds / trainer.world_size, device, product_dtype(trainer)),
                **reading.memory,
            },
        )
        if self.max_skipped_steps is not None and longest_skip >= self.max_skipped_steps:
            raise DivergedError(
                f"step {reading.step}: {longest_skip:.0f} consecutive optimizer steps were skipped, because their "
                "gradients contained NaN or infinity. Try a lower optimizer.lr, or increase "
                "callbacks.monitor.max_skipped_steps"
            )

    def _of_ranks(self, reading: Reading, seconds: float, together: bool) -> dict[str, float]:
        """Returns the metrics that each rank measures itself.

        seconds: the time of a step.
        together: whether to return means and maxima over the ranks. A run of one rank ignores `together`.
        """
        own = {
            "perf/step_ms": 1e3 * seconds,
            "perf/data_wait_ms": 1e3 * reading.waited / reading.steps,
            "perf/host_gib": resident_bytes() / GIB,
        }
        if reading.step_start is None or self._group is None:
            return own
        waiting = sum(end.seconds_since(start) for start, end in reading.communication)
        own["perf/communication_ms"] = 1e3 * waiting
        own["perf/compute_ms"] = 1e3 * (reading.end.seconds_since(reading.step_start) - waiting)
        return compare_ranks(own, self._group) if together else own

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log_reading(trainer)
        self._validation_start = Timestamp(pl_module.device)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.val_step = trainer.global_step
        self.log_metrics(trainer, trainer.global_step, {"val/loss": trainer.callback_metrics["val/loss"].item()})
        self._validations.append((self._validation_start, Timestamp(pl_module.device)))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs the last step if the run stopped early and this step is not logged yet."""
        self.log_reading(trainer)
        if trainer.global_step > self._window_step:
            assert isinstance(pl_module, LitGPT)
            measured = {"loss": pl_module.step_loss, "grad_norm": pl_module.step_grad_norm}
            measured["skipped_steps"] = pl_module.skipped_steps
            values = {f"train/{name}": float(value) for name, value in measured.items()}
            self.log_metrics(trainer, trainer.global_step, {**values, "lr": self._lr})

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # The device may have failed, or may wait forever for a failed rank. An error here must not replace the
        # exception that ended the run, because other callbacks must still handle that exception.
        try:
            alone = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
            if self._reading is not None and (alone or self._reading.end.passed()):
                self.log_reading(trainer, together=alone)
        except DivergedError as error:
            self.has_diverged = True
            trainer.print(f"error: {error}")
        except Exception as error:
            trainer.print(f"error: the last metrics of the run were not logged: {error}")
        self._reading = None
        if self._timer is not None:
            self._timer.end()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores `tokens`, batch_size, and the losses of the checkpoint's step."""
        assert isinstance(pl_module, LitGPT)
        losses = {"train/loss": pl_module.step_loss.item()}
        if self.val_step == trainer.global_step:
            losses["val/loss"] = self.latest["val/loss"]
        checkpoint |= {TOKENS: self.tokens_by(trainer.global_step), LOSSES: losses, BATCH_SIZE: self.batch_size}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continues the count of tokens. Prints a warning if batch_size has changed.

        Stores the checkpoint's learning rate in _checkpoint_lr. on_train_start compares _checkpoint_lr with this run's
        learning rate.
        A checkpoint of an older version stores neither `tokens` nor batch_size. If `tokens` is missing, the number of
        tokens is computed from the checkpoint's step and this run's tokens per step.
        """
        step = self._resumed_step = checkpoint["global_step"]
        self._resumed_tokens = checkpoint.get(TOKENS, step * self.tokens_per_step)
        for scheduler in checkpoint.get("lr_schedulers", []):
            self._checkpoint_lr = scheduler.get("_last_lr", [None])[0]
        stored = checkpoint.get(BATCH_SIZE, self.batch_size)
        if stored != self.batch_size:
            first, expected = step * self.batch_size, step * stored
            effect = "skipped" if first > expected else "repeated"
            trainer.print(
                f"warning: {difference(BATCH_SIZE, self.batch_size, stored)}. The data continue at row {first} "
                f"(step * batch_size) instead of row {expected}, so {abs(first - expected)} rows are {effect}"
            )

    def tokens_by(self, step: int) -> int:
        """Returns the number of tokens in the first `step` optimizer steps, including the steps before a resume."""
        return self._resumed_tokens + (step - self._resumed_step) * self.tokens_per_step

    @property
    def older_val_step(self) -> int | None:
        """The step of the newest val/loss if that step is not the newest logged step, otherwise None."""
        return None if self.val_step == self.latest_step else self.val_step

    def summary(self) -> dict[str, float]:
        """Returns the newest value of each metric. tokens_per_s is the median of the last `RECENT_LOGS` logs.

        If the run has had a validation, the result also has val/step, the step of val/loss. If memory ran out, the
        result also has oom=1.
        """
        of_run = {"perf/tokens_per_s": statistics.median(self._rates)} if self._rates else {}
        return self.latest | of_run | ({} if self.val_step is None else {VAL_STEP: self.val_step})

    def log_metrics(self, trainer: L.Trainer, step: int, metrics: dict[str, float]) -> None:
        """Logs `metrics` and the metric `tokens`, which is the number of tokens in the first `step` optimizer steps."""
        metrics = metrics | {"tokens": self.tokens_by(step)}
        self.latest |= metrics
        self.of_latest_step = (self.of_latest_step if step == self.latest_step else {}) | metrics
        self.latest_step = step
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)


def monitor_of(trainer: L.Trainer) -> Monitor:
    """Returns the run's Monitor. Raises: ValueError if the trainer has no Monitor."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Monitor):
            return callback
    raise ValueError("the trainer's callbacks must contain a Monitor; got none")


def is_logged(trainer: L.Trainer, step: int) -> bool:
    """Returns whether the metrics of optimizer step `step` are logged."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return step % every == 0 or step == trainer.max_steps


def time_waited(trainer: L.Trainer) -> float:
    """Returns the seconds that the host has waited for training data, or 0 if the data loader does not measure them."""
    return float(getattr(trainer.train_dataloader, "waited", 0.0))


def resident_bytes() -> int:
    """Returns the host memory of this process in bytes, without its data workers."""
    statm = Path("/proc/self/statm")  # the second number is the size of the resident set in pages
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def product_dtype(trainer: L.Trainer) -> torch.dtype:
    """Returns the dtype of a run's matrix products."""
    return torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32


def utilisation(flops_per_s: float, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns perf/mfu: one device's model FLOP/s divided by its peak. Returns an empty dict if the peak is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return {"perf/mfu": flops_per_s / peak} if peak else {}


def memory(device: torch.device) -> dict[str, float]:
    """Returns a GPU's peak allocated and peak reserved memory in GiB.

    On the CPU, returns the process's peak resident memory since `forget_peak_of_host`.
    """
    if device.type == "cuda":
        return {
            "perf/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "perf/reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return {"perf/peak_gib": peak_of_host() / GIB}


def peak_of_host() -> int:
    """Returns the peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    # use VmHWM: on Linux, ru_maxrss includes the peak of the parent process
    if status.exists() and (peak := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(peak[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak_of_host() -> None:
    """Resets the result of `peak_of_host` to the current memory, if /proc/self/clear_refs can be written."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def require_measured(metric: str | None, trainer: L.Trainer) -> None:
    """Raises: ValueError if Monitor cannot measure optimized_metric=`metric` with the run's device and precision."""
    device, dtype = trainer.strategy.root_device, product_dtype(trainer)
    needs = {"perf/mfu": "bf16 on a GPU whose peak FLOP/s are known", "perf/reserved_gib": "a GPU"}.get(str(metric))
    if needs is not None and metric not in utilisation(0.0, device, dtype) | memory(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise ValueError(f"optimized_metric={metric} needs {needs}; got {str(dtype).removeprefix('torch.')} on {name}")
