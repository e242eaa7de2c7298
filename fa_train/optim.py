"""The optimizer's parameter groups and the learning rate over time."""

import math
from collections.abc import Sequence

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


def adamw(
    model: nn.Module, *, lr: float, weight_decay: float, betas: Sequence[float], eps: float, fused: bool
) -> AdamW:
    """AdamW (arXiv:1711.05101) that decays matrices and token embeddings, but not norms, biases or position embeddings.

    Parameters that do not require a gradient are left out.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and "position_embedding" not in name
            (decayed if is_matrix else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    # plain floats: the optimizer's state must load without the configuration's list class
    first, second = (float(beta) for beta in betas)
    return AdamW(groups, lr=lr, betas=(first, second), eps=eps, fused=fused)


def warmup_cosine(optimizer: Optimizer, *, warmup_steps: int, max_steps: int, min_lr_ratio: float) -> LambdaLR:
    """Linear warm-up to the optimizer's lr, then half a cosine down to min_lr_ratio of it at max_steps.

    Units: warmup_steps, max_steps in optimizer steps; the first step has lr / warmup_steps. A run that ends before
    its warm-up does never reaches lr.
    Raises: ValueError on warmup_steps below 0, max_steps below 1 or min_lr_ratio outside 0 to 1.
    """
    if warmup_steps < 0:
        raise ValueError(f"scheduler.warmup_steps must be at least 0; got {warmup_steps}")
    if max_steps < 1:
        raise ValueError(f"scheduler.max_steps must be at least 1; got {max_steps}")
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"scheduler.min_lr_ratio must be from 0 to 1; got {min_lr_ratio}")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
