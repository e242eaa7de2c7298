"""Builds optimizers with fixed settings."""

import torch
from torch import nn

from fa_train.optim.adamw import adamw


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Returns AdamW for the parameters of a model."""
    return adamw(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=False)
