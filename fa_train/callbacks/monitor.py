"""Callbacks that watch a run: measurements, progress, its record, interrupts and running out of memory."""

import atexit
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import wandb
from lightning.fabric.utilities import distributed
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.strategies import launchers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.optim import Optimizer
from wandb.plot import CustomChart

from fa_train.bounds import PositiveInt
from fa_train.checkpoints.files import CheckpointError
from fa_train.data.datamodule import Report
from fa_train.data.packing.report import Histogram
from fa_train.flops import peak_flops, train_flops
from fa_train.lit_gpt import LitGPT
from fa_train.private_names import private, replace_private

GIB = 2**30
_destroy_dist_connection = private("lightning", distributed, "_destroy_dist_connection")
_SubprocessScriptLauncher = private("lightning", launchers, "_SubprocessScriptLauncher")


class DivergedError(RuntimeError):
    """The gradients of too many optimizer steps in a row were not finite."""


class Monitor(Callback):
    """Logs loss, gradient norm, learning rate, throughput, MFU and memory, every trainer.log_every_n_steps steps.

    Each log costs one device-to-host copy, the only ones of training. `tokens`, all that the run has seen, goes with
    every metric and is W&B's x-axis. perf/* is of the steps since the last log, validation excluded; perf/mfu is
    absent where the device's peak is not known. `latest` keeps the newest value of each metric.
    max_skipped_steps: this many skipped optimizer steps in a row (see LitGPT) end the run at the next log; None sets no
    limit. train/skipped_steps counts all skipped steps since the run began.
    Units: losses in nats a label, tokens_per_s over all devices, step_ms in milliseconds, *_gib in GiB of rank 0.
    """

    def __init__(self, seq_len: PositiveInt, batch_size: PositiveInt, max_skipped_steps: PositiveInt | None) -> None:
        self.tokens_per_step, self.max_skipped_steps = seq_len * batch_size, max_skipped_steps
        self.latest: dict[str, float] = {}
        self._rates: list[float] = []
        self._lr = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()  # an earlier run of a sweep may have left its memory in a reference cycle
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._window_start, self._window_step = time.perf_counter(), trainer.global_step

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # the scheduler moves on before the step can be logged

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step - self._window_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = trainer.global_step % every == 0 or trainer.global_step == trainer.max_steps
        if not steps or not due:
            return
        assert isinstance(pl_module, LitGPT)
        steps_skipped = [pl_module.skipped_steps, pl_module.longest_skip]
        measured = [pl_module.step_loss, pl_module.step_grad_norm, pl_module.step_squared_lengths, *steps_skipped]
        # tolist waits for the device
        loss, grad_norm, squared_lengths, skipped, longest_skip = torch.stack([x.double() for x in measured]).tolist()
        seconds = (time.perf_counter() - self._window_start) / steps
        flops = train_flops(pl_module.model, self.tokens_per_step, squared_lengths)
        dtype = torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32
        self._rates.append(self.tokens_per_step / seconds)
        self._log(
            trainer,
            {
                "train/loss": loss,
                "train/grad_norm": grad_norm,
                "train/skipped_steps": skipped,
                "lr": self._lr,
                "perf/tokens_per_s": self._rates[-1],
                "perf/step_ms": 1e3 * seconds,
                **utilisation(flops / seconds / trainer.world_size, pl_module.device, dtype),
                **memory(pl_module.device),
            },
        )
        self._window_start, self._window_step = time.perf_counter(), trainer.global_step
        if self.max_skipped_steps is not None and longest_skip >= self.max_skipped_steps:
            wait_for_other_ranks(trainer)  # all ranks come here at the same step
            raise DivergedError(
                f"the gradients of {longest_skip:.0f} optimizer steps in a row were not finite, by step "
                f"{trainer.global_step}; those steps changed nothing. Try a lower optimizer.lr, or allow more with "
                "callbacks.monitor.max_skipped_steps"
            )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # the steps before it end outside its time
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log(trainer, {"val/loss": trainer.callback_metrics["val/loss"].item()})
        self._window_start += time.perf_counter() - self._validation_start

    def summary(self) -> dict[str, float]:
        """The newest of every metric; of tokens_per_s the median, which starting up does not touch."""
        return self.latest | ({"perf/tokens_per_s": statistics.median(self._rates)} if self._rates else {})

    def _log(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        metrics = metrics | {"tokens": trainer.global_step * self.tokens_per_step}
        self.latest |= metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def monitor_of(trainer: L.Trainer) -> Monitor:
    """The run's Monitor."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, Monitor))  # type: ignore[attr-defined]


def utilisation(flops_per_s: float, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """perf/mfu: model FLOP/s of one device over its peak in dtype; nothing where that peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return {"perf/mfu": flops_per_s / peak} if peak else {}


def memory(device: torch.device) -> dict[str, float]:
    """Peak and reserved GiB of a GPU since the run began; on the CPU the process's peak resident size."""
    if device.type == "cuda":
        return {
            "perf/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "perf/reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return {"perf/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class StepProgress(ProgressBar):
    """A bar over optimizer steps with what Monitor measured last; where nobody watches a terminal, a line a log."""

    def __init__(self) -> None:
        super().__init__()
        console = Console()
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._lines = not console.is_terminal
        self._task = self._bar.add_task("")
        self._shown = ""

    def enable(self) -> None:
        self._bar.disable, self._lines = not self._bar.console.is_terminal, not self._bar.console.is_terminal

    def disable(self) -> None:
        self._bar.disable, self._lines = True, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar.update(self._task, total=trainer.max_steps, completed=trainer.global_step)
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._bar.stop()

    def _show(self, trainer: L.Trainer) -> None:
        measured = describe(monitor_of(trainer).latest)
        self._bar.update(self._task, completed=trainer.global_step, description=measured)
        if self._lines and measured != self._shown:
            print(f"step {trainer.global_step}/{trainer.max_steps}  {measured}", flush=True)
        self._shown = measured


def describe(metrics: dict[str, float]) -> str:
    """The metrics that a person watches, in one line; those not yet measured are left out."""
    shown = {
        "train/loss": "loss {:.4f}",
        "val/loss": "val {:.4f}",
        "perf/tokens_per_s": "{:,.0f} tokens/s",
        "perf/mfu": "mfu {:.1%}",
        "perf/peak_gib": "peak {:.2f} GiB",
    }
    if metrics.get("train/skipped_steps"):
        shown["train/skipped_steps"] = "skipped {:.0f}"
    return "  ".join(text.format(metrics[name]) for name, text in shown.items() if name in metrics)


class Record(Callback):
    """Says where a run is recorded, closes that record however the run ends, and leaves result.json in its folder."""

    def __init__(self) -> None:
        self._first_step = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = trainer.global_step
        if wandb.run is not None:
            wandb.run.define_metric("tokens")
            wandb.run.define_metric("*", step_metric="tokens", step_sync=True)
            report: Report = trainer.datamodule.packing_report()  # type: ignore[attr-defined]
            wandb.run.summary.update(report.metrics())
            wandb.run.log({name: length_chart(histogram) for name, histogram in report.charts().items()})
            trainer.print(f"wandb: {wandb.run.settings.sync_dir if wandb.run.offline else wandb.run.url}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
        trainer.print(f"done: {describe(results(trainer))}" + (f"\ncheckpoint: {checkpoint}" if checkpoint else ""))
        wandb.finish()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        explained = not isinstance(exception, ValueError) or isinstance(exception, CheckpointError)
        if not explained and trainer.global_step > self._first_step:
            traceback.print_exception(exception)  # no mistake in the settings: those would have come before
        self._write(trainer)
        wandb.finish(exit_code=1)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "result.json").write_text(json.dumps(results(trainer), indent=1) + "\n")


def length_chart(histogram: Histogram) -> CustomChart:
    """Bars for W&B: how many documents have at most so many tokens, and more than half of that."""
    table = wandb.Table(columns=["tokens", "documents"], data=[[f"≤ {longest:,}", n] for longest, n in histogram])
    return wandb.plot.bar(table, "tokens", "documents", title="Document lengths")


def wait_for_other_ranks(trainer: L.Trainer) -> None:
    """Waits until the ranks that this process started have ended, each with a nonzero exit status.

    Lightning's observer would take that status for a failure and kill this process, perhaps before it is done. The wait
    is at this process's exit, after it has ended its connections: with NCCL, ranks do that together.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        ranks = launcher.procs.copy()
        launcher.procs.clear()  # the observer's list, too
        atexit.register(_end, ranks)
        atexit.unregister(_destroy_dist_connection)  # what was registered last runs first
        atexit.register(_destroy_dist_connection)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        try:
            rank.wait(timeout=30)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class GracefulInterrupt(Callback):
    """Ctrl-C and SIGTERM end a run, of any number of ranks: a micro-batch is finished, Checkpoint saves, exit 143.

    A second one ends it at once. Any rank may get the signal, and any number of them.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer, self._process = trainer, os.getpid()
        self._asked_at: float | None = None
        self._agreement = Agreement() if trainer.world_size > 1 else None
        # Lightning's own handler broadcasts, in the midst of whatever collective the signal came into, and hangs. It
        # registers this one in place of that when this hook has run, and stops where received_sigterm is set.
        self._connector = private("lightning", trainer, "_signal_connector")
        replace_private("lightning", self._connector, "_sigterm_notifier_fn", self._on_signal)
        # what all ranks agree on here, it would broadcast from rank 0 every micro-batch, and wait for the device
        replace_private("lightning", trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.signal(signal.SIGINT, self._on_signal)  # Lightning puts back the handlers that were there before fit

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._agree()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._agree()

    def _agree(self) -> None:
        if self._agreement and not self._trainer.received_sigterm and self._agreement.any(self._asked_at is not None):
            replace_private("lightning", self._connector, "received_sigterm", True)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data worker, forked with this handler: the terminal's Ctrl-C is not for it
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            if self._trainer.is_global_zero:  # print() must not be interrupted by another one
                os.write(1, b"\ninterrupted: saving after this step; once more (Ctrl-C or SIGTERM) stops at once\n")
            if not self._agreement:
                replace_private("lightning", self._connector, "received_sigterm", True)
        elif time.monotonic() - self._asked_at > 1:  # torchrun and others pass on what the terminal has sent already
            launcher = self._trainer.strategy.launcher
            if isinstance(launcher, _SubprocessScriptLauncher):
                launcher.kill(signal.SIGKILL)
            os._exit(128 + signum)


class Agreement:
    """Whether any rank says yes, the same answer on all ranks, one question late.

    Ranks that left at different steps would wait for each other in collectives that do not match. Each question is an
    all-reduce of one integer, in a group of its own over the CPUs, so that it meets no other collective and waits for
    no device; as every rank asks at the end of every micro-batch, all get the same answers at the same places. It runs
    during the next micro-batch, at whose end it is read: a host only waits for others a micro-batch behind. A flag in
    the store would not do, since nothing bounds by how many steps hosts run ahead of each other.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None

    def any(self, yes: bool) -> bool:
        """Asks, unless the last question, which is answered here, found a yes."""
        if self._asked is not None:
            self._asked.wait()
        if self._answer.item():
            return True
        self._answer.fill_(yes)
        self._asked = dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group, async_op=True)
        return False


class OutOfMemory(Callback):
    """Running out of memory is a result: oom=1 in every logger, and a line that says what to change."""

    def __init__(self, seq_len: PositiveInt, micro_batch_size: PositiveInt, attention: str) -> None:
        self.seq_len, self.micro_batch_size, self.attention = seq_len, micro_batch_size, attention

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        monitor_of(trainer).latest |= memory(pl_module.device) | {"oom": 1}
        for logger in trainer.loggers:
            logger.log_metrics({"oom": 1}, step=trainer.global_step)
        print(f"error: out of memory: {self.advice(memory(pl_module.device)['perf/peak_gib'])}", file=sys.stderr)

    def advice(self, peak_gib: float) -> str:
        """What did not fit, and what to change."""
        changes = [] if self.attention == "flash" else ["attention=flash"]
        changes += [f"data.micro_batch_size={self.micro_batch_size // 2}"] if self.micro_batch_size > 1 else []
        changes += ["a smaller seq_len or model"]
        return (
            f"seq_len={self.seq_len} with attention={self.attention} and data.micro_batch_size={self.micro_batch_size}"
            f" needs more than the device has (peak {peak_gib:.1f} GiB). Try {', '.join(changes)}"
        )


def results(trainer: L.Trainer) -> dict[str, float]:
    """A run's newest metrics, with oom=1 when memory ran out."""
    return monitor_of(trainer).summary()


def is_out_of_memory(exception: BaseException) -> bool:
    """Of a GPU, or of the host, which torch reports as a RuntimeError of its CPU allocator."""
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(exception)
