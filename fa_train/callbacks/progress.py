"""Shows the progress of training: a bar over optimizer steps, or lines of text if the output is not a terminal."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fa_train.callbacks.monitor import monitor_of


class StepProgress(ProgressBar):
    """A progress bar over optimizer steps with the latest metrics.

    Without a terminal, prints one line per log, and one line with the loss of each validation.

    Lightning's progress bars count micro-batches, but show the number of optimizer steps as the total. At the end of a
    run with 40 steps of 4 micro-batches, a Lightning bar shows "160/40". Without a terminal, Lightning's bars print no
    metrics.
    """

    def __init__(self) -> None:
        super().__init__()
        whole = Column(no_wrap=True)  # in a narrow terminal, only the metrics wrap, and the bar gets shorter
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.description}", table_column=Column()),
            console=Console(),
        )
        self.enable()
        self._task = self._bar.add_task("")
        self._shown = ""

    def enable(self) -> None:
        self._lines = self._bar.disable = not self._bar.console.is_terminal

    def disable(self) -> None:
        self._bar.disable, self._lines = True, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar.update(self._task, total=trainer.max_steps, completed=trainer.global_step)
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)  # Monitor may have logged a training step since the last call of _show

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._show(trainer)
        if self._lines:
            val = describe({"val/loss": trainer.callback_metrics["val/loss"].item()})
            print(f"step {trainer.global_step}/{trainer.max_steps}  {val}", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        monitor_of(trainer).log_reading(trainer)  # Monitor may come later in the list of callbacks
        self._show(trainer)
        self._bar.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._show(trainer)
        self._bar.stop()

    def _show(self, trainer: L.Trainer) -> None:
        monitor = monitor_of(trainer)
        description = describe(monitor.latest, monitor.older_val_step)
        self._bar.update(self._task, completed=trainer.global_step, description=description)
        measured = describe({name: value for name, value in monitor.of_latest_step.items() if name != "val/loss"})
        if not measured:  # there is no log yet, or the newest log has only val/loss
            return
        if self._lines and measured != self._shown:
            print(f"step {monitor.latest_step}/{trainer.max_steps}  {measured}", flush=True)
        self._shown = measured


def describe(metrics: dict[str, float], val_step: int | None = None) -> str:
    """Returns the main metrics as one line of text. Omits metrics that have not been measured yet.

    val_step: the step of val/loss, or None if it equals the step of the other metrics.
    """
    shown = {
        "train/loss": "loss none (no labels in this step)" if without_labels(metrics) else "loss {:.4f}",
        "val/loss": "val {:.4f}" if val_step is None else f"val {{:.4f}} (step {val_step})",
        "perf/tokens_per_s": "{:,.0f} tokens/s",
        "perf/mfu": "mfu {:.1%}",
        "perf/peak_gib": "peak {:.2f} GiB",
        "perf/host_gib": "host {:.1f} GiB",
    }
    if metrics.get("train/skipped_steps"):
        shown["train/skipped_steps"] = "skipped {:.0f}"
    texts = [text.format(metrics[name]) for name, text in shown.items() if name in metrics]
    return "  ".join([*texts, *waiting(metrics)])


def without_labels(metrics: dict[str, float]) -> bool:
    """Returns whether the loss is NaN because the step had no labels.

    If the NaN came from the model, grad_norm would be NaN too.
    """
    return math.isnan(metrics.get("train/loss", 0.0)) and metrics.get("train/grad_norm") == 0


def waiting(metrics: dict[str, float]) -> list[str]:
    """Returns up to three short texts about what slows training.

    The result has the percentage of time spent waiting for data, if it is above 1%. With several ranks, the result also
    has the percentage of time spent in communication, and the slowest rank.
    """
    texts = []
    if metrics.get("perf/data_wait_ms", 0) > 0.01 * metrics.get("perf/step_ms", 0):
        texts.append(f"data wait {metrics['perf/data_wait_ms'] / metrics['perf/step_ms']:.0%}")
    if "perf/slowest_rank" in metrics:
        communication, compute = metrics["perf/communication_ms"], metrics["perf/compute_ms"]
        texts.append(f"communication {communication / (communication + compute):.0%}")
        texts.append(f"slowest rank {metrics['perf/slowest_rank']:.0f}, {metrics['perf/slowest_over_mean']:.2f}x mean")
    return texts
