"""Measures a run: loss, gradient norm, learning rate, throughput, MFU and memory."""

import gc
import resource
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from fa_train.bounds import PositiveInt
from fa_train.callbacks.timestamp import Timestamp
from fa_train.errors import DivergedError
from fa_train.flops import peak_flops, train_flops
from fa_train.lit_gpt import LitGPT
from fa_train.parallel.launched_ranks import wait_for_other_ranks

GIB = 2**30
RECENT_LOGS = 1000  # the number of most recent logs whose median speed `summary` returns


@dataclass(frozen=True)
class Reading:
    """The measurements of one step for a log. The device may still be computing `values`."""

    step: int
    steps: int  # since the last reading
    lr: float
    memory: dict[str, float]
    values: Tensor  # LitGPT's tensors, (5,) fp64 in host memory; read them only after `end`
    start: Timestamp
    end: Timestamp
    validations: list[tuple[Timestamp, Timestamp]]  # between start and end


class Monitor(Callback):
    """Logs loss, gradient norm, learning rate, throughput, MFU and memory every trainer.log_every_n_steps steps.

    A log needs one copy from the device to the host. Training makes no other copies to the host. The host reads this
    copy after it has launched the next micro-batch, so the device never waits for the host. A pending log is finished
    before a validation, before a checkpoint and at the end of a run.
    `latest` holds the newest value of each metric. `latest_step` is the step of the newest log. Every log contains
    `tokens`, the number of tokens that were trained on so far, which is the x-axis in W&B. The metrics perf/* cover the
    steps since the previous log, without validation. perf/mfu is missing if the device's peak FLOP/s are unknown.
    train/skipped_steps is the number of skipped optimizer steps (see LitGPT).
    max_skipped_steps: after this number of consecutive skipped steps, the next log ends the run. None sets no limit.
    Units: losses in nats per label, tokens_per_s over all devices, step_ms in milliseconds, *_gib in GiB on rank 0.
    """

    def __init__(self, seq_len: PositiveInt, batch_size: PositiveInt, max_skipped_steps: PositiveInt | None) -> None:
        self.tokens_per_step, self.max_skipped_steps = seq_len * batch_size, max_skipped_steps
        self.latest: dict[str, float] = {}
        self.latest_step = 0
        self.has_diverged = False  # whether a log found divergence after another exception had ended the run
        self._rates: deque[float] = deque(maxlen=RECENT_LOGS)
        self._lr = 0.0
        self._reading: Reading | None = None  # not logged yet
        self._validations: list[tuple[Timestamp, Timestamp]] = []  # since the last reading

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()  # in a sweep, an earlier run may have left GPU memory in a reference cycle
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._window_start, self._window_step = Timestamp(pl_module.device), trainer.global_step
        self._validations.clear()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # the scheduler changes lr before the log

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log_reading(trainer)
        steps = trainer.global_step - self._window_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = trainer.global_step % every == 0 or trainer.global_step == trainer.max_steps
        if not steps or not due:
            return
        assert isinstance(pl_module, LitGPT)
        steps_skipped = [pl_module.skipped_steps, pl_module.longest_skip]
        measured = [pl_module.step_loss, pl_module.step_grad_norm, pl_module.step_squared_lengths, *steps_skipped]
        # the host does not wait for this copy, because it goes to pinned memory
        values = torch.stack([x.double() for x in measured]).to("cpu", non_blocking=True)
        end = Timestamp(pl_module.device)
        self._reading = Reading(
            trainer.global_step, steps, self._lr, memory(pl_module.device), values, self._window_start, end,
            self._validations.copy(),
        )  # fmt: skip
        self._window_start, self._window_step = end, trainer.global_step
        self._validations.clear()

    def log_reading(self, trainer: L.Trainer) -> None:
        """Finishes a pending log, if there is one: waits until the device has finished the step, and logs its values.

        All ranks must call log_reading at the same point of a run.
        Raises: DivergedError if max_skipped_steps or more consecutive steps were skipped.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return
        reading.end.wait()
        loss, grad_norm, squared_lengths, skipped, longest_skip = reading.values.tolist()
        validation = sum(end.seconds_since(start) for start, end in reading.validations)
        seconds = (reading.end.seconds_since(reading.start) - validation) / reading.steps
        lit_gpt, device = trainer.lightning_module, trainer.strategy.root_device
        assert isinstance(lit_gpt, LitGPT)
        flops = train_flops(lit_gpt.model.config, self.tokens_per_step, squared_lengths)
        dtype = torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32
        self._rates.append(self.tokens_per_step / seconds)
        self._log(
            trainer,
            reading.step,
            {
                "train/loss": loss,
                "train/grad_norm": grad_norm,
                "train/skipped_steps": skipped,
                "lr": reading.lr,
                "perf/tokens_per_s": self._rates[-1],
                "perf/step_ms": 1e3 * seconds,
                **utilisation(flops / seconds / trainer.world_size, device, dtype),
                **reading.memory,
            },
        )
        if self.max_skipped_steps is not None and longest_skip >= self.max_skipped_steps:
            wait_for_other_ranks(trainer)  # all ranks raise this error at the same step
            raise DivergedError(
                f"the gradients of {longest_skip:.0f} consecutive optimizer steps were not finite, by step "
                f"{reading.step}; these steps were skipped. Try a lower optimizer.lr, or increase "
                "callbacks.monitor.max_skipped_steps"
            )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log_reading(trainer)
        self._validation_start = Timestamp(pl_module.device)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log(trainer, trainer.global_step, {"val/loss": trainer.callback_metrics["val/loss"].item()})
        self._validations.append((self._validation_start, Timestamp(pl_module.device)))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log_reading(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # The device may have failed, or may wait forever for a failed rank. An error here must not replace the
        # exception that ended the run, because other callbacks must still handle that exception.
        try:
            alone = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
            if self._reading is not None and (alone or self._reading.end.passed()):
                self.log_reading(trainer)
        except DivergedError as error:
            self.has_diverged = True
            trainer.print(f"error: {error}")
        except Exception as error:
            trainer.print(f"error: the last values were not logged: {error}")
        self._reading = None

    def summary(self) -> dict[str, float]:
        """Returns the newest value of each metric. tokens_per_s is the median of the last RECENT_LOGS logs."""
        return self.latest | ({"perf/tokens_per_s": statistics.median(self._rates)} if self._rates else {})

    def _log(self, trainer: L.Trainer, step: int, metrics: dict[str, float]) -> None:
        metrics = metrics | {"tokens": step * self.tokens_per_step}
        self.latest |= metrics
        self.latest_step = step
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)


def monitor_of(trainer: L.Trainer) -> Monitor:
    """Returns the run's Monitor."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, Monitor))  # type: ignore[attr-defined]


def utilisation(flops_per_s: float, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns perf/mfu: one device's model FLOP/s divided by its peak. Returns an empty dict if the peak is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return {"perf/mfu": flops_per_s / peak} if peak else {}


def memory(device: torch.device) -> dict[str, float]:
    """Returns a GPU's peak allocated and reserved memory in GiB. On the CPU, returns the peak resident set size."""
    if device.type == "cuda":
        return {
            "perf/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "perf/reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return {"perf/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


def results(trainer: L.Trainer) -> dict[str, float]:
    """Returns a run's metrics. If the run was out of memory, the metrics include oom=1."""
    return monitor_of(trainer).summary()
