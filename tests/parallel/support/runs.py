"""A function that trains one rank of a run, and a callback that makes a rank fail."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from fa_train import training
from tests.support.training import composed, tiny

SETTINGS = (
    "data.val_rows=3", "max_steps=6", "trainer.val_check_interval=6", "callbacks.checkpoint.every_n_train_steps=3",
    "callbacks.checkpoint.save_top_k=-1",
)  # fmt: skip


def train_in(folder: Path, corpus: Path, *overrides: str) -> Path:
    """Trains in this process and returns the folder of the run. The config is written as train.py would write it."""
    folder.mkdir(exist_ok=True)
    with composed(folder, *tiny(corpus, *SETTINGS, *overrides)) as cfg:
        if os.environ.get("RANK", "0") == "0":
            (folder / ".hydra").mkdir()
            settings = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
            OmegaConf.save(settings, folder / ".hydra" / "config.yaml")
            OmegaConf.save(HydraConfig.instance().cfg, folder / ".hydra" / "hydra.yaml")
        training.train(cfg)
    return folder


class Fails(Callback):
    """Kills one rank in its third step, or makes this rank call sys.exit(0) or raise an out-of-memory error.

    Writes the time of the failure to the file `failed_at` in the working directory.
    """

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if (trainer.global_rank, trainer.global_step) != (self.rank, 2):
            return
        Path("failed_at").write_text(str(time.monotonic()))
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            sys.exit(0)
        raise torch.OutOfMemoryError("CUDA out of memory")
