"""Callbacks for tests of checkpoints: one replaces validation losses, and one simulates a full disk."""

import errno

import torch
from lightning.pytorch.callbacks import Callback


class Losses(Callback):
    """Replaces the validation losses of a run by the given losses, in order."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = list(losses)

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        pl_module.on_validation_epoch_end = lambda: pl_module.log("val/loss", self.losses.pop(0), logger=False)


class FullDisk(Callback):
    """Makes torch.save fail for the checkpoint of the given step and for all later checkpoints."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer, pl_module) -> None:
        save = trainer.save_checkpoint

        def save_on_a_full_disk(path, **options) -> None:
            if trainer.global_step >= self.step:
                torch.save = self.fail  # type: ignore[assignment]
            save(path, **options)

        trainer.save_checkpoint = save_on_a_full_disk

    def fail(self, content, file) -> None:
        file.write(b"PK half of a checkpoint")
        raise OSError(errno.EFBIG, "File too large")
