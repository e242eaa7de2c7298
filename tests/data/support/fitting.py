"""Fits a module that only records its batches, and stops it at a given step."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Killed(Exception):
    """Raised where a real run would be killed."""


class Recorder(L.LightningModule):
    """A Lightning module that records its batches, trains nothing, and raises Killed at a given step."""

    def __init__(self, die_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.die_at = [], die_at

    def training_step(self, batch, batch_idx):
        if self.die_at is not None and self.global_step == self.die_at:
            raise Killed
        self.seen.append(batch["tokens"])
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        assert len(batch["tokens"]) % 16 == 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, recorder, data, ckpt_path=None):
    """Runs six steps with checkpoints in `folder`, and returns the batches that the recorder saw."""
    trainer = L.Trainer(
        max_steps=6, max_epochs=-1, accumulate_grad_batches=data.accumulation(1), accelerator="cpu", logger=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        num_sanity_val_steps=0, val_check_interval=8, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(recorder, datamodule=data, ckpt_path=ckpt_path)
    return recorder.seen
