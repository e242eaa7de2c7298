"""Lightning's Trainer and LitGPT for tests that train without train.py."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fa_train.lit_gpt import LitGPT
from fa_train.models.gpt import GPT


def quiet_trainer(folder: Path, **settings: Any) -> L.Trainer:
    """Returns a trainer on the CPU with one device that logs, saves and shows nothing, unless `settings` differ."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", default_root_dir=folder, **{"devices": 1} | quiet | settings)


def lit_gpt(model: GPT, optimizer: Any) -> LitGPT:
    """Returns the module that trains the model at a constant learning rate. optimizer: see LitGPT."""
    constant = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
    return LitGPT(model, optimizer, constant, compile_model=False, seed=0)
