"""Records a run on Weights & Biases (W&B) and in the file result.json."""

import itertools
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fa_train.callbacks.monitor import monitor_of
from fa_train.callbacks.progress import describe
from fa_train.checkpoints.files import CheckpointError, require_writable
from fa_train.data.mixing import Report
from fa_train.data.packing.report import Histogram
from fa_train.errors import TrainedWeightsError, is_of_disk

if TYPE_CHECKING:  # importing wandb takes a second
    import wandb
    from wandb.plot import CustomChart


class Record(Callback):
    """Prints where a run is recorded. At the end or on an error, writes result.json and closes the W&B run."""

    def __init__(self) -> None:
        self._first_step = math.inf  # the step at which training starts

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = math.inf
        for logger in trainer.loggers:
            _set_finalize(logger, partial(_finalize, trainer, logger, logger.finalize))
        if run := wandb_run(trainer):
            run.define_metric("tokens")
            run.define_metric("*", step_metric="tokens", step_sync=True)
            report: Report = trainer.datamodule.packing_report()  # type: ignore[attr-defined]
            run.summary.update(report.metrics())
            charts = {name: length_chart(histogram) for name, histogram in report.charts().items()}
            try:
                run.log(charts)
            except PermissionError as error:  # wandb writes a chart's table to a folder in the home directory
                raise ValueError(f"wandb needs a folder that can be written; got the error: {error}") from error
            if not run.disabled:
                trainer.print(f"wandb: {run.settings.sync_dir if run.offline else run.url}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
        if trainer.global_step < trainer.max_steps:
            trainer.print(f"stopped after step {trainer.global_step} of {trainer.max_steps}: {reason_of_end(trainer)}")
        monitor = monitor_of(trainer)
        measured = describe(monitor.summary(), monitor.older_val_step) or "no step was trained"
        trainer.print(f"done: {measured}" + (f"\ncheckpoint: {checkpoint}" if checkpoint else ""))
        if run := wandb_run(trainer):
            for logger in trainer.loggers:
                logger.finalize("success")  # uploads checkpoints, which is impossible after run.finish
            _close(run, trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        is_explained = isinstance(exception, CheckpointError | TrainedWeightsError)
        is_short = isinstance(exception, ValueError | MisconfigurationException) or is_of_disk(exception)
        if is_short and not is_explained and trainer.global_step > self._first_step:
            # print a traceback, because a user's mistake would have caused the error before the first step
            traceback.print_exception(exception)
        self._write(trainer)
        if run := wandb_run(trainer):
            _close(run, trainer, exit_code=1)

    def _write(self, trainer: L.Trainer) -> None:
        """Writes result.json, or prints an error if the file cannot be written. Omits NaN and infinity.

        If this run has measured nothing, the result.json of an earlier run in the same folder is kept.

        The error is only printed, because an exception would change the status of a finished run. In a failed run, an
        exception from this function would prevent the checkpoint callback from saving.
        """
        if trainer.is_global_zero:
            values = {name: value for name, value in monitor_of(trainer).summary().items() if math.isfinite(value)}
            path = Path(trainer.default_root_dir, "result.json")
            if not values and path.exists():
                return
            partial = path.with_name("result.json.partial")
            try:
                partial.write_text(json.dumps(values, indent=1) + "\n")
                os.replace(partial, path)
            except OSError as error:
                with suppress(OSError):
                    partial.unlink()
                trainer.print(f"error: result.json was not written: {error}")


def require_folders(trainer: L.Trainer) -> None:
    """Creates the folders of the loggers. Call this function on rank 0.

    Raises: ValueError if no file can be written into a folder. Without this check, W&B would silently write to the
    folder for temporary files.
    """
    for logger in trainer.loggers:
        folder = None if logger.save_dir is None else os.fspath(logger.save_dir)
        if folder is not None and "://" not in folder:  # not on another machine
            require_writable(Path(folder), "logger.save_dir")


def keep_earlier_metrics(trainer: L.Trainer) -> None:
    """Renames the metrics.csv of an earlier run in the same folder, because Lightning's CSV logger would delete it.

    Call this function before the logger writes anything.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            path = Path(logger.log_dir, "metrics.csv")
            if path.exists():
                names = (path.with_name(f"metrics-{i}.csv") for i in itertools.count(1))
                kept = path.rename(next(name for name in names if not name.exists()))
                trainer.print(f"the metrics of an earlier run in this folder are now in {kept}")


@contextmanager
def closed_on_error(trainer: L.Trainer) -> Iterator[None]:
    """A context manager that closes the W&B run if an error leaves it open.

    Record closes the run after most errors, but Lightning does not call Record after an error of another logger or of
    another callback's on_exception. The next job of a multirun would write to a run that is still open.
    """
    try:
        yield
    except BaseException:
        if run := wandb_run(trainer):
            _close(run, trainer, exit_code=1)
        raise


def log_config(logger: Logger, config: dict[str, Any]) -> None:
    """Passes the run's config to a logger. WandbLogger starts the W&B run here.

    Raises: ValueError if wandb refuses to start the run, for example because the server does not answer.
    """
    try:
        logger.log_hyperparams(config)
    except Exception as error:
        if isinstance(logger, WandbLogger):
            import wandb

            if isinstance(error, wandb.Error):
                advice = ". logger.mode=offline needs no server" if isinstance(error, wandb.errors.CommError) else ""
                raise ValueError(f"wandb must start a run; got {type(error).__name__}: {error}{advice}") from error
        raise


def _finalize(trainer: L.Trainer, logger: Logger, finalize: Callable[[str], None], status: str) -> None:
    """Calls `finalize`, the logger's own method, and prints its error. After an error, later calls do nothing.

    Lightning calls logger.finalize at the end of a run. An exception there would prevent the export, or replace the
    error that has ended the run.
    """
    try:
        finalize(status)
    except Exception as error:
        _set_finalize(logger, lambda status: None)
        trainer.print(f"error: {type(logger).__name__} did not finish: {type(error).__name__}: {error}")


def _set_finalize(logger: Logger, finalize: Callable[[str], None]) -> None:
    setattr(logger, "finalize", finalize)  # noqa: B010  mypy allows no assignment to a method


def _close(run: "wandb.Run", trainer: L.Trainer, exit_code: int = 0) -> None:
    """Closes a W&B run, or prints an error if closing fails, for example because the disk is full.

    The error is only printed, because an exception would prevent a failed run from saving its checkpoint, and a
    finished run from being exported.
    """
    try:
        run.finish(exit_code=exit_code)
    except Exception as error:  # W&B raises errors of many types
        trainer.print(f"error: the W&B run was not closed: {type(error).__name__}: {error}")


def reason_of_end(trainer: L.Trainer) -> str:
    """Returns why a callback has ended a run before max_steps."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if message := getattr(callback, "stopping_reason_message", None):  # an attribute of EarlyStopping
            return str(message).removesuffix(" Signaling Trainer to stop.")
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
            return "the time of trainer.max_time is over"
    return "a callback has set trainer.should_stop"


def wandb_run(trainer: L.Trainer) -> "wandb.Run | None":
    """Returns the W&B run of this process. Returns None if another logger is used, and on all ranks except 0."""
    if not any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
        return None
    import wandb

    return wandb.run


def length_chart(histogram: Histogram) -> "CustomChart":
    """Returns a W&B bar chart of a histogram from `fa_train.data.packing.report.length_histogram`."""
    import wandb

    table = wandb.Table(columns=["tokens", "documents"], data=[[f"≤ {longest:,}", n] for longest, n in histogram])
    return wandb.plot.bar(table, "tokens", "documents", title="Document lengths")
