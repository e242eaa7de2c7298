"""A callback that saves and removes a run's checkpoints, and a function that exports the last checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import lightning as L
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fa_train.bounds import PositiveInt
from fa_train.callbacks.monitor import monitor_of, results
from fa_train.checkpoints.files import (
    PARTIAL,
    SUFFIX,
    CheckpointError,
    all_finite,
    remove,
    remove_partial,
    rename_into_place,
)
from fa_train.errors import DivergedError
from fa_train.models.hf.export import Build, export_run
from fa_train.parallel.fsdp import FullyShardedStrategy, local


class Checkpoint(CheckpointCallback):
    """Saves a checkpoint every every_n_train_steps steps and at the end of a run.

    save_top_k: the number of newest checkpoints to keep, or -1 to keep all.
    keep_best: whether to save a checkpoint also after each validation with a new lowest val/loss. The checkpoint with
    the lowest val/loss is kept in addition to the newest ones.
    save_on_exception: whether to save a checkpoint also on SIGTERM, on Ctrl-C and, in a run of one process, on errors.
    A checkpoint gets its final name when it is completely on the disk. Older checkpoints are removed only when the new
    one is complete. Weights with NaN or infinity are never saved.
    """

    current_score = None  # without current_score, Lightning's loggers ignore last_model_path

    def __init__(
        self,
        dirpath: str,
        every_n_train_steps: PositiveInt,
        save_top_k: PositiveInt | Literal[-1],
        keep_best: bool,
        save_on_exception: bool,
    ) -> None:
        self.folder = Path(dirpath)
        self.every_n_train_steps, self.save_top_k, self.keep_best = every_n_train_steps, save_top_k, keep_best
        self.save_on_exception = save_on_exception
        self.saved: list[Path] = []  # the checkpoints that this process has saved, oldest first
        self.best_model_path, self.best_model_score = "", float("inf")
        self._saved_step: int | None = None  # None before training starts
        self._warned = False

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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step  # do not save the initial state

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.keep_best or trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val/loss"].item()  # equal on all ranks
        if loss < self.best_model_score and self._save(trainer, pl_module):
            self.best_model_path, self.best_model_score = str(self.saved[-1]), loss
            self._prune(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Several ranks can save only if all are at the same step, which is certain only after GracefulInterrupt.
        # Diverged weights must not replace an older checkpoint.
        diverged = isinstance(exception, DivergedError) or monitor_of(trainer).has_diverged
        alone = trainer.world_size == 1 and not isinstance(exception, CheckpointError)
        if self.save_on_exception and not diverged and (alone or isinstance(exception, SIGTERMException)):
            try:
                self._save(trainer, pl_module)
            except CheckpointError as error:  # only print this error, because another exception has ended the run
                trainer.print(f"error: {error}")
        if self.saved:
            trainer.print(f"checkpoint: {self.saved[-1]}; ckpt_path=last resumes from it")

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Saves the current step unless it has been saved. Returns on all ranks whether the step is saved."""
        if self._saved_step is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        if trainer.global_step == self._saved_step:
            return self.has_saved(trainer.global_step)
        monitor_of(trainer).log_reading(trainer)  # raises an error if the run has diverged
        finite = all_finite(local(p) for p in pl_module.parameters() if p.requires_grad)
        if not trainer.strategy.reduce_boolean_decision(finite, all=True):
            if not self._warned:
                trainer.print(f"warning: step {trainer.global_step} is not saved: its weights are not finite")
            self._warned = True
            return False
        if trainer.is_global_zero:
            remove_partial(self.folder)
        path = trainer.strategy.broadcast(self._free_path(trainer.global_step))
        self._write(trainer, path)
        self.saved.append(path)
        self._saved_step = trainer.global_step
        self._prune(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.after_save_checkpoint(proxy(self))
        return True

    def _write(self, trainer: L.Trainer, path: Path) -> None:
        """Writes a checkpoint. Raises: CheckpointError on all ranks if any rank fails."""
        partial = path.with_name(path.name + PARTIAL)
        failure: CheckpointError | None = None
        try:
            trainer.save_checkpoint(partial)
        except CheckpointError as error:
            failure = error
            if not isinstance(trainer.strategy, FullyShardedStrategy):
                trainer.strategy.barrier()  # all other ranks wait at the end of save_checkpoint
        failure = trainer.strategy.broadcast(failure)
        if failure is not None:
            raise failure
        if trainer.is_global_zero:
            rename_into_place(partial, path)

    def _prune(self, trainer: L.Trainer) -> None:
        """Removes the checkpoints that this process has saved, except the newest save_top_k and the best one."""
        old = [] if self.save_top_k == -1 else self.saved[: -self.save_top_k]
        for path in old:
            if str(path) != self.best_model_path:
                self.saved.remove(path)
                if trainer.is_global_zero:
                    remove(path)

    def _free_path(self, step: int) -> Path:
        """Returns a path that does not exist yet. An earlier run may have left checkpoints in the same folder."""
        names = [f"step_{step:07d}", *(f"step_{step:07d}-v{i}" for i in range(1, 100))]
        return next(path for path in (self.folder / (name + SUFFIX) for name in names) if not path.exists())


def require_checkpoint(trainer: L.Trainer) -> None:
    """Raises: ValueError if the run saves no checkpoints. An export needs the last checkpoint."""
    if not isinstance(trainer.checkpoint_callback, Checkpoint):  # an export needs this project's checkpoints
        raise ValueError("export=true must have checkpoints to write from; got callbacks.checkpoint=null")


def export_last(trainer: L.Trainer, build: Build, config: Mapping[str, Any]) -> None:
    """Exports a finished run on rank 0. The weights are read from the last checkpoint.

    In a sharded run, no rank has all weights in memory.
    Raises: ValueError if the last step was not saved. Also raises the errors of fa_train.models.hf.export.export_run.
    """
    checkpoint = trainer.checkpoint_callback
    assert isinstance(checkpoint, Checkpoint)
    if not checkpoint.has_saved(trainer.global_step):
        newest = f"the newest checkpoint is {checkpoint.saved[-1]}" if checkpoint.saved else "there is no checkpoint"
        raise ValueError(f"export=true must have finite weights at the last step; got NaN or infinity, and {newest}")
    if trainer.is_global_zero:
        folders = export_run(checkpoint.saved[-1], Path(trainer.default_root_dir), build, config, results(trainer))
        trainer.print("".join(f"exported: {folder}\n" for folder in folders), end="")
