"""The optimizer's parameter groups, the learning rate over time, and what a resumed run takes from a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fa_train.bounds import Betas, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt


def adamw(
    model: nn.Module,
    *,
    lr: NonNegativeFloat,
    weight_decay: NonNegativeFloat,
    betas: Betas,
    eps: NonNegativeFloat,
    fused: bool,
) -> AdamW:
    """AdamW (arXiv:1711.05101) that decays matrices and token embeddings, but not norms, biases or position embeddings.

    Parameters that do not require a gradient are left out.
    """
    optimizer = AdamW(parameter_groups(model, weight_decay), lr=lr, betas=_pair(betas), eps=eps, fused=fused)
    optimizer.register_load_state_dict_pre_hook(with_own_settings)
    return optimizer


def adamw_8bit(
    model: nn.Module,
    *,
    lr: NonNegativeFloat,
    weight_decay: NonNegativeFloat,
    betas: Betas,
    eps: NonNegativeFloat,
    stochastic_rounding: bool,
) -> Optimizer:
    """adamw with its moments in 8 bits. Parameters of fewer than 4096 numbers keep moments in their own dtype.

    stochastic_rounding: of weights in bf16 (trainer.precision=bf16-true); those in fp32 are their own masters.
    """
    from fa_train.optim.low_memory import EightBitAdamW

    optimizer = EightBitAdamW(
        parameter_groups(model, weight_decay),
        lr=lr,
        betas=_pair(betas),
        eps=eps,
        weight_decay=weight_decay,
        bf16_stochastic_round=stochastic_rounding,
    )
    optimizer.register_load_state_dict_pre_hook(with_own_settings)
    return optimizer


def adamw_bf16(
    model: nn.Module, *, lr: NonNegativeFloat, weight_decay: NonNegativeFloat, betas: Betas, eps: NonNegativeFloat
) -> Optimizer:
    """adamw of weights in bf16, with moments in bf16 and stochastic rounding instead of a master copy in fp32.

    Raises: ValueError on weights that are not bf16, as those of adapters (fa_train.models.lora) never are.
    """
    from fa_train.optim.low_memory import RoundingAdamW

    groups = parameter_groups(model, weight_decay)
    others = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]} - {"bfloat16"}
    if others and any(not p.requires_grad for p in model.parameters()):
        raise ValueError("optimizer=adamw_bf16 cannot train adapters, which are fp32; choose optimizer=adamw")
    if others:
        raise ValueError(
            f"optimizer=adamw_bf16 needs bfloat16 weights, trainer.precision=bf16-true; got {', '.join(sorted(others))}"
        )
    optimizer = RoundingAdamW(
        groups, lr=lr, betas=_pair(betas), eps=eps, weight_decay=weight_decay, bf16_stochastic_round=True
    )
    optimizer.register_load_state_dict_pre_hook(with_own_settings)
    return optimizer


def adamw_offload(
    model: nn.Module, *, lr: NonNegativeFloat, weight_decay: NonNegativeFloat, betas: Betas, eps: NonNegativeFloat
) -> Optimizer:
    """adamw with weights, gradients and moments in host memory too, where the CPU updates them.

    Raises: ValueError on a model that is not on a GPU.
    """
    groups = parameter_groups(model, weight_decay)
    devices = {p.device.type for group in groups for p in group["params"]}
    if devices != {"cuda"}:
        raise ValueError(f"optimizer=adamw_offload needs a model on a CUDA GPU; got {', '.join(sorted(devices))}")
    from fa_train.optim.low_memory import OffloadedAdamW

    return OffloadedAdamW(groups, lr=lr, betas=_pair(betas), eps=eps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed parameters and the others, of those that require a gradient."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and "position_embedding" not in name
            (decayed if is_matrix else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    """Plain floats: the optimizer's state must load without the configuration's list class."""
    first, second = (float(beta) for beta in betas)
    return first, second


def with_own_settings(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The state_dict `saved`, but with the optimizer's current settings, such as lr and betas.

    Moments and step counts stay as saved.
    """
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if len(own) != len(saved["param_groups"]):
        return saved  # torch raises an error on it
    groups = [group | settings for group, settings in zip(saved["param_groups"], own, strict=True)]
    return saved | {"param_groups": groups}


KINDS = ("adamw", "adamw_8bit", "adamw_bf16", "adamw_offload")  # the functions above and the files of conf/optimizer


def require_same_kind(configured: Callable[..., Optimizer], saved: Mapping[str, Any]) -> None:
    """Raises: ValueError if another of the KINDS than `configured` wrote `saved`. configured: may be a partial."""
    own = getattr(configured, "func", configured).__name__
    if own not in KINDS:
        return  # of somebody else, whose states may look like anything
    written_by = kinds_that_write(saved)
    if own not in written_by:
        raise ValueError(
            f"ckpt_path must be a checkpoint of optimizer={own}; got one of optimizer={' or '.join(written_by)}"
        )


def kinds_that_write(saved: Mapping[str, Any]) -> Sequence[str]:
    """The KINDS whose state_dict can look like `saved`."""
    if "offloaded" in saved:
        return ["adamw_offload"]
    if any("fused" in group for group in saved["param_groups"]):
        return ["adamw"]
    moments = [state["exp_avg"] for state in saved["state"].values()]
    if any(isinstance(moment, dict) for moment in moments):
        return ["adamw_8bit"]
    if any(moment.numel() >= 4096 and moment.numel() % 256 == 0 for moment in moments):  # adamw_8bit quantises these
        return ["adamw_bf16"]
    return ["adamw_8bit", "adamw_bf16"]


class Schedule(LambdaLR):
    """LambdaLR that loads only its position from a checkpoint. The peak and the curve come from the current config."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = [
            lr * factor(self.last_epoch) for lr, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: NonNegativeInt, max_steps: PositiveInt, min_lr_ratio: Fraction
) -> LambdaLR:
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

    return Schedule(optimizer, factor)
