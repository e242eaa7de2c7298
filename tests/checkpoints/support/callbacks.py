"""Callbacks for tests: they replace validation losses, simulate a full disk, or change which weights are trained."""

import errno

import torch
from lightning.pytorch.callbacks import Callback

from fa_train.models.gpt import GPT


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


def freeze_embedding(model: GPT) -> GPT:
    model.token_embedding.weight.requires_grad_(False)
    return model


class FreezeAfterStepTwo(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step >= 2:
            freeze_embedding(pl_module.model)


class FreezeOnFitStart(Callback):
    def on_fit_start(self, trainer, pl_module) -> None:
        freeze_embedding(pl_module.model)


class UnfreezeAfterStepTwo(Callback):
    """Freezes the embedding before training, and unfreezes it before step 3.

    updated: whether the optimizer updates the embedding after step 2.
    """

    def __init__(self, updated: bool = True) -> None:
        self.updated = updated

    def setup(self, trainer, pl_module, stage) -> None:
        freeze_embedding(pl_module.model)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step >= 2 and not pl_module.model.token_embedding.weight.requires_grad:
            self.unfreeze(trainer, pl_module)

    def unfreeze(self, trainer, pl_module) -> None:
        weight = pl_module.model.token_embedding.weight.requires_grad_(True)
        if self.updated:
            trainer.optimizers[0].param_groups[0]["params"].append(weight)


class UnfreezeOnFitStart(UnfreezeAfterStepTwo):
    def on_fit_start(self, trainer, pl_module) -> None:
        self.unfreeze(trainer, pl_module)
