"""A callback that saves and removes a run's checkpoints, and a function that exports the last checkpoint."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import lightning as L
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from fa_train.bounds import PositiveInt
from fa_train.callbacks.monitor import monitor_of
from fa_train.callbacks.timestamp import Timestamp
from fa_train.checkpoints import resume
from fa_train.checkpoints.files import (
    PARTIAL,
    SUFFIX,
    CheckpointError,
    all_finite,
    not_written,
    remove,
    remove_partial,
    rename_into_place,
    require_writable,
)
from fa_train.checkpoints.metrics import read_result
from fa_train.errors import DivergedError
from fa_train.models.hf.export import Build, export_run
from fa_train.models.shards import local
from fa_train.parallel.background_save import BackgroundSave
from fa_train.parallel.fsdp import FullyShardedStrategy

GRACE = 30.0  # seconds that a failing run waits for a checkpoint that is still being written


@dataclass
class Save:
    """A checkpoint that is being written. stall: the seconds for which the save paused training."""

    path: Path
    step: int
    stall: float = 0.0
    is_best: bool = False


class Checkpoint(CheckpointCallback):
    """Saves a checkpoint every every_n_train_steps steps and at the end of a run.

    run_name: the run's name, which determines the folder that ckpt_path=last searches.
    save_top_k: the number of newest checkpoints to keep, or -1 to keep all.
    keep_best: whether to save a checkpoint after a validation if its val/loss is the lowest so far. The checkpoint with
    the lowest val/loss is kept in addition to the newest ones. A resumed run remembers the lowest val/loss. With
    keep_best, a checkpoint that is due at the same step as a validation is saved after the validation. If the
    validation fails in a run of several processes, the checkpoint that waits for it is not saved.
    save_on_exception: whether to save another checkpoint if a signal such as Ctrl-C or SIGTERM ends the run. With
    save_on_exception, a run of one process also saves a checkpoint after an error, unless the error occurred while the
    weights were updated.
    asynchronous: whether training goes on while a checkpoint is written. A run of one rank ignores `asynchronous`. The
    ranks first copy the checkpoint to CPU memory. The next save and the end of a run wait until the checkpoint is
    written. If a rank cannot write its part of the checkpoint, the run ends.
    A checkpoint gets its final name when it is completely on the disk. Older checkpoints are removed only when the new
    one is complete. Weights with NaN or infinity are never saved.
    Logs perf/save_s, the duration of a save in seconds. Logs perf/save_stall_s, the seconds for which the save paused
    training.
    """

    current_score = None  # Lightning's loggers ignore last_model_path if current_score is missing

    def __init__(
        self,
        dirpath: str,
        run_name: Any,
        every_n_train_steps: PositiveInt,
        save_top_k: PositiveInt | Literal[-1],
        keep_best: bool,
        save_on_exception: bool,
        asynchronous: bool,
    ) -> None:
        self.folder, self.runs = Path(dirpath), resume.runs_folder(run_name)
        self.every_n_train_steps, self.save_top_k, self.keep_best = every_n_train_steps, save_top_k, keep_best
        self.save_on_exception, self.asynchronous = save_on_exception, asynchronous
        self.saved: list[Path] = []  # the checkpoints that this process has saved, oldest first
        self.best_model_path, self.best_model_score = "", float("inf")
        self._saved_step: int | None = None  # None before training starts
        self._update_after: int | None = None  # the global step at which the newest update of the weights started
        self._warned = False
        self._background: BackgroundSave | None = None
        self._save_in_flight: Save | None = None  # equal on all ranks
        self._loggers_are_open = True

    @property
    def last_model_path(self) -> str:
        """The path of this run's newest checkpoint, or an empty string."""
        return str(self.saved[-1]) if self.saved else ""

    def has_saved(self, step: int) -> bool:
        """Returns whether the newest checkpoint was saved at step `step`."""
        return bool(self.saved) and self._saved_step == step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            remove_partial(self.folder)
        self._loggers_are_open = True
        if self.asynchronous and trainer.world_size > 1:
            self._background = BackgroundSave(trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step  # do not save the initial state

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._update_after = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._save_in_flight is not None and self._background is not None and self._background.done_everywhere():
            self._finish(trainer)
        # If no checkpoint is due at the last step, one is saved anyway, after the step's validation, to store val/loss.
        # With keep_best, every checkpoint is saved after the validation of its step.
        waits = self.keep_best or not self._is_due(trainer)
        if not (waits and _validation_follows(trainer)):
            self._save_if_due(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val/loss"].item() if self.keep_best else math.inf  # equal on all ranks
        if loss < self.best_model_score:
            self._save_best(trainer, pl_module, loss)
        else:
            self._save_if_due(trainer, pl_module)

    def _save_if_due(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:  # before callbacks change the weights in on_train_end
            self._save_last(trainer, pl_module)
        elif self._is_due(trainer):
            self._save(trainer, pl_module)

    def _is_due(self, trainer: L.Trainer) -> bool:
        return trainer.global_step % self.every_n_train_steps == 0

    def _save_last(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            self._end_background(trainer)
        finally:  # the last step is saved even if an earlier step could not be saved
            self._save(trainer, pl_module)

    def _save_best(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: float) -> None:
        lowest, self.best_model_score = self.best_model_score, loss  # set first, because _save stores best_model_score
        if not self._save(trainer, pl_module):
            self.best_model_score = lowest
        elif self._save_in_flight is not None:
            self._save_in_flight.is_best = True
        else:
            self.best_model_path = str(self.saved[-1])
            self._prune(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best_model_score": self.best_model_score} if self.keep_best else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_score = state_dict.get("best_model_score", self.best_model_score)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_last(trainer, pl_module)  # does nothing if the last step is already saved

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._loggers_are_open = False  # the callback Record has already closed the W&B run
        stopped = isinstance(exception, SIGTERMException)
        try:
            if stopped or isinstance(exception, DivergedError):  # all ranks stopped at the same step
                self._end_background(trainer)
            else:
                self._finish_alone()
        except CheckpointError as error:  # only print this error, because another exception has ended the run
            trainer.print(f"error: {error}")
        try:
            if self._may_save(trainer, exception):
                self._save(trainer, pl_module)
        except CheckpointError as error:
            trainer.print(f"error: {error}")
        except Exception as error:  # after some errors, the GPU computes nothing more
            if trainer.world_size > 1:
                raise
            reported = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            trainer.print(f"error: step {trainer.global_step} was not saved: {reported}")
        if self.saved:
            newest = self.saved[-1]
            trainer.print(f"checkpoint: {newest}; {resume.override_for(newest, self.runs)} resumes from it")
        elif stopped and trainer.global_step == self._saved_step:
            trainer.print("no checkpoint was saved, because the run stopped in its first step")

    def _may_save(self, trainer: L.Trainer, exception: BaseException) -> bool:
        """Returns whether a run that `exception` has ended should save a checkpoint. All ranks return the same."""
        diverged = isinstance(exception, DivergedError) or monitor_of(trainer).has_diverged
        if not self.save_on_exception or diverged:  # diverged weights must not replace an older checkpoint
            return False
        if isinstance(exception, SIGTERMException):  # after a signal, GracefulInterrupt stops all ranks at one step
            return True
        # After an error, several ranks may be at different steps. A failed update may have changed only some weights.
        half_updated = self._update_after == trainer.global_step  # an update increases global_step at its end
        return trainer.world_size == 1 and not half_updated and not isinstance(exception, CheckpointError)

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Saves a checkpoint of the current step, unless it is already saved. The save may go on in the background.

        Returns whether a checkpoint of the current step exists or is being written. The result is equal on all ranks.
        """
        if self._saved_step is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        if self._save_in_flight is not None and self._save_in_flight.step == trainer.global_step:
            return True
        start = Timestamp(trainer.strategy.root_device)
        self._finish(trainer)
        if trainer.global_step == self._saved_step:
            return self.has_saved(trainer.global_step)
        monitor_of(trainer).log_reading(trainer)  # raises an error if the run has diverged
        finite = all_finite(local(p) for p in pl_module.parameters() if p.requires_grad)
        if not trainer.strategy.reduce_boolean_decision(finite, all=True):
            if not self._warned:
                trainer.print(
                    f"warning: no checkpoint at step {trainer.global_step}: the weights contain NaN or infinity"
                )
            self._warned = True
            return False
        if trainer.is_global_zero:
            remove_partial(self.folder)
        save = Save(trainer.strategy.broadcast(self._free_path(trainer.global_step)), trainer.global_step)
        partial = save.path.with_name(save.path.name + PARTIAL)
        if self._background is None:
            self._write(trainer, partial, save.path)
            save.stall = _seconds_since(start, trainer)
            self._complete(trainer, save, seconds=save.stall)
        else:
            trainer.save_checkpoint(partial, storage_options=self._background)
            save.stall = _seconds_since(start, trainer)
            self._save_in_flight = save
        return True

    def _write(self, trainer: L.Trainer, partial: Path, path: Path) -> None:
        """Writes a checkpoint. Raises: CheckpointError on all ranks if any rank fails."""
        failure: CheckpointError | None = None
        try:
            trainer.save_checkpoint(partial)
        except CheckpointError as error:
            failure = error
            if not isinstance(trainer.strategy, FullyShardedStrategy):
                trainer.strategy.barrier()  # all other ranks wait at the end of save_checkpoint
        if failure is None and trainer.is_global_zero:
            try:
                rename_into_place(partial, path)
            except OSError as error:
                failure = not_written(path, error)
        failure = trainer.strategy.broadcast(failure)
        if failure is not None:
            raise failure

    def _finish(self, trainer: L.Trainer) -> None:
        """Waits for a save in the background. Raises: CheckpointError on all ranks if any rank failed to write."""
        save, self._save_in_flight = self._save_in_flight, None
        if save is not None:
            assert self._background is not None
            self._background.finish()
            self._complete(trainer, save, seconds=save.stall + self._background.seconds)

    def _finish_alone(self) -> None:
        """Waits at most `GRACE` seconds for a save in the background. No other rank needs to call this method."""
        save, self._save_in_flight = self._save_in_flight, None
        if save is not None and self._background is not None and self._background.finish_alone(GRACE):
            self.saved.append(save.path)

    def _end_background(self, trainer: L.Trainer) -> None:
        """Waits for a save in the background. After this call, all saves run in the foreground."""
        try:
            self._finish(trainer)
        finally:
            self._background = None

    def _complete(self, trainer: L.Trainer, save: Save, seconds: float) -> None:
        """Records a complete checkpoint, and removes older checkpoints."""
        self.saved.append(save.path)
        self._saved_step = save.step
        if save.is_best:
            self.best_model_path = str(save.path)
        self._prune(trainer)
        if self._loggers_are_open:
            times = {"perf/save_stall_s": save.stall, "perf/save_s": seconds}
            monitor_of(trainer).log_metrics(trainer, trainer.global_step, times)
            for logger in trainer.loggers if trainer.is_global_zero else []:
                logger.after_save_checkpoint(proxy(self))

    def _prune(self, trainer: L.Trainer) -> None:
        """Removes the checkpoints that this process has saved, except the newest save_top_k and the best checkpoint."""
        old = [] if self.save_top_k == -1 else self.saved[: -self.save_top_k]
        for path in old:
            if str(path) != self.best_model_path:
                self.saved.remove(path)
                if trainer.is_global_zero:
                    try:
                        remove(path)
                    except OSError as error:  # the run can go on, because the new checkpoint is complete
                        trainer.print(f"warning: the old checkpoint {path} was not removed: {error}")

    def _free_path(self, step: int) -> Path:
        """Returns a path that does not exist yet. An earlier run may have left checkpoints in the same folder."""
        names = itertools.chain([f"step_{step:07d}"], (f"step_{step:07d}-v{i}" for i in itertools.count(1)))
        return next(path for path in (self.folder / (name + SUFFIX) for name in names) if not path.exists())


def _validation_follows(trainer: L.Trainer) -> bool:
    """Returns whether Lightning runs a validation after the batch that ends now."""
    interval, batches = trainer.val_check_batch, trainer.fit_loop.epoch_loop.total_batch_idx + 1
    return sum(trainer.num_val_batches) > 0 and interval is not None and batches % interval == 0


def _seconds_since(start: Timestamp, trainer: L.Trainer) -> float:
    """Returns the seconds from `start` to now. Waits for the device."""
    end = Timestamp(trainer.strategy.root_device)
    end.wait()
    return end.seconds_since(start)


def require_folder(trainer: L.Trainer) -> None:
    """Creates the folder for checkpoints. Call this function on rank 0.

    Raises: ValueError if no file can be written into the folder.
    """
    if isinstance(trainer.checkpoint_callback, Checkpoint):
        require_writable(trainer.checkpoint_callback.folder, "callbacks.checkpoint.dirpath")


def require_checkpoint(trainer: L.Trainer) -> None:
    """Raises: ValueError if the run saves no checkpoints. An export needs the last checkpoint."""
    if not isinstance(trainer.checkpoint_callback, Checkpoint):  # export_last cannot use Lightning's ModelCheckpoint
        raise ValueError("export=true needs checkpoints, since it exports the last one; got callbacks.checkpoint=null")


def export_last(trainer: L.Trainer, build: Build, config: Mapping[str, Any]) -> None:
    """Exports a finished run on rank 0.

    The weights are read from the last checkpoint, because no rank of a sharded run has all weights in memory.
    Raises: ValueError if the last step was not saved, or the run trained no step. Also raises the errors of
    fa_train.models.hf.export.export_run.
    """
    checkpoint = trainer.checkpoint_callback
    assert isinstance(checkpoint, Checkpoint)
    if trainer.global_step == 0:
        raise ValueError("export=true needs at least one training step; the run ended before its first step")
    if not checkpoint.has_saved(trainer.global_step):
        advice = "The run has no earlier checkpoint"
        if checkpoint.saved:
            advice = f"`python -m scripts.export_hf {checkpoint.saved[-1]} <folder>` exports the newest checkpoint"
        raise ValueError(f"export=true needs finite weights at the last step; got NaN or infinity. {advice}")
    _export(trainer, checkpoint.saved[-1], build, config, monitor_of(trainer).summary())


def export_finished(trainer: L.Trainer, checkpoint: Path, build: Build, config: Mapping[str, Any]) -> None:
    """Exports the checkpoint that a run was resumed from, if the resumed run trains no step.

    Writes the export into the folder of the current run.

    Raises: the errors of fa_train.models.hf.export.export_run.
    """
    _export(trainer, checkpoint, build, config, read_result(checkpoint.absolute().parent.parent))


def _export(
    trainer: L.Trainer, checkpoint: Path, build: Build, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> None:
    if trainer.is_global_zero:
        folders = export_run(checkpoint, Path(trainer.default_root_dir), build, config, metrics)
        trainer.print("".join(f"exported: {folder}\n" for folder in folders), end="")
