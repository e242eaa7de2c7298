"""The learning-rate schedule."""

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fa_train.bounds import Fraction, NonNegativeInt, PositiveInt


class LearningRateSchedule(LambdaLR):
    """A LambdaLR that loads only the step from a checkpoint.

    The current config defines the learning rate of each step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = steps_in(state_dict)
        self._last_lr = [
            lr * factor(self.last_epoch) for lr, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def steps_in(saved: Mapping[str, Any]) -> int:
    """Returns the number of steps in the state_dict of a scheduler.

    The state_dict of a ChainedScheduler has no number of steps. For a ChainedScheduler, the result is the number of
    steps of its first scheduler.
    Raises: ValueError if `saved` has no number of steps, which can happen with a user's own scheduler.
    """
    if "last_epoch" in saved:
        return int(saved["last_epoch"])
    if not saved.get("_schedulers"):
        raise ValueError(
            "ckpt_path must be a checkpoint whose scheduler saved its number of steps as last_epoch; got a scheduler "
            f"that saved {', '.join(sorted(saved)) or 'nothing'}"
        )
    return steps_in(saved["_schedulers"][0])


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: NonNegativeInt, max_steps: PositiveInt, min_lr_ratio: Fraction
) -> LambdaLR:
    """Returns a schedule with linear warm-up to the optimizer's lr, and then cosine decay to min_lr_ratio * lr.

    warmup_steps: the number of warm-up steps. The learning rate of the first step is lr / warmup_steps.
    max_steps: the step at which the decay ends. Steps are optimizer steps.
    Raises: ValueError if warmup_steps is below 0, max_steps is below 1, or min_lr_ratio is not between 0 and 1.
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

    return LearningRateSchedule(optimizer, factor)


def unfinished_warmup(*, warmup_steps: int, max_steps: int, lr: float) -> str | None:
    """Returns a warning if a run ends before its warm-up ends, and otherwise None.

    max_steps: the number of steps of the run. lr: the optimizer's lr.
    """
    if warmup_steps <= max_steps:
        return None
    return (
        f"warning: the learning rate rises only to {lr * max_steps / warmup_steps:.3g}, and never reaches "
        f"optimizer.lr={lr:g}: the warm-up has scheduler.warmup_steps={warmup_steps} steps, but the run has only "
        f"{max_steps}. Set for example scheduler.warmup_steps={max(1, max_steps // 10)}"
    )
