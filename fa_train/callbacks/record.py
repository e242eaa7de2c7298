"""Records a run on Weights & Biases and in result.json."""

import json
import traceback
from pathlib import Path

import lightning as L
import wandb
from lightning.pytorch.callbacks import Callback
from wandb.plot import CustomChart

from fa_train.callbacks.monitor import results
from fa_train.callbacks.progress import describe
from fa_train.checkpoints.files import CheckpointError
from fa_train.data.packing.report import Histogram, Report


class Record(Callback):
    """Prints where a run is recorded, closes the W&B run at the end or on an error, and writes result.json."""

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
            traceback.print_exception(exception)  # not a user's mistake, which ends a run before the first step
        self._write(trainer)
        wandb.finish(exit_code=1)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "result.json").write_text(json.dumps(results(trainer), indent=1) + "\n")


def length_chart(histogram: Histogram) -> CustomChart:
    """Returns a W&B bar chart of document lengths (see `fa_train.data.packing.report.length_histogram`)."""
    table = wandb.Table(columns=["tokens", "documents"], data=[[f"≤ {longest:,}", n] for longest, n in histogram])
    return wandb.plot.bar(table, "tokens", "documents", title="Document lengths")
