"""Torch's autocast, which trainer.precision=bf16-mixed turns on."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product with x is computed: autocast's dtype, or else x's dtype."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
