"""AdamW, and variants of AdamW that need less memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from fa_train.bounds import Betas, NonNegativeFloat, PositiveFloat

# the names of the optimizers of this file, and of their YAML files in conf/optimizer
OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_bf16", "adamw_master", "adamw_offload"]


def adamw(
    model: nn.Module,
    *,
    lr: NonNegativeFloat,
    weight_decay: NonNegativeFloat,
    betas: Betas,
    eps: PositiveFloat,
    fused: bool,
) -> AdamW:
    """Returns AdamW (arXiv:1711.05101) for the parameters that require gradients.

    Weight decay applies to matrices and token embeddings, but not to norms, biases or position embeddings.
    """
    return AdamW(parameter_groups(model, weight_decay), lr=lr, betas=_pair(betas), eps=eps, fused=fused)


def adamw_8bit(
    model: nn.Module,
    *,
    lr: NonNegativeFloat,
    weight_decay: NonNegativeFloat,
    betas: Betas,
    eps: PositiveFloat,
    stochastic_rounding: bool,
) -> Optimizer:
    """Returns AdamW with 8-bit moments.

    If a parameter has fewer than 4096 elements, or a number of elements that is not a multiple of 256, its moments have
    the dtype of the parameter.
    stochastic_rounding: whether updated bf16 weights (trainer.precision=bf16-true) are rounded stochastically.
    Stochastic rounding has no effect on fp32 weights.
    """
    from fa_train.optim.low_memory import EightBitAdamW

    return EightBitAdamW(
        parameter_groups(model, weight_decay),
        lr=lr,
        betas=_pair(betas),
        eps=eps,
        weight_decay=weight_decay,
        bf16_stochastic_round=stochastic_rounding,
    )


def adamw_bf16(
    model: nn.Module, *, lr: NonNegativeFloat, weight_decay: NonNegativeFloat, betas: Betas, eps: PositiveFloat
) -> Optimizer:
    """Returns AdamW for bf16 weights, with bf16 moments. Stochastic rounding makes fp32 master weights unnecessary.

    Raises: ValueError if a trained weight is not bf16. For example, the weights of LoRA adapters are always fp32.
    """
    from fa_train.optim.low_memory import RoundingAdamW

    groups = _bf16_groups(model, weight_decay, "adamw_bf16")
    return RoundingAdamW(
        groups, lr=lr, betas=_pair(betas), eps=eps, weight_decay=weight_decay, bf16_stochastic_round=True
    )


def adamw_master(
    model: nn.Module, *, lr: NonNegativeFloat, weight_decay: NonNegativeFloat, betas: Betas, eps: PositiveFloat
) -> Optimizer:
    """Returns AdamW for bf16 weights, with fp32 moments and exact fp32 master weights.

    Raises: ValueError if a trained weight is not bf16. For example, the weights of LoRA adapters are always fp32.
    """
    from fa_train.optim.master_weights import MasterWeightsAdamW

    groups = _bf16_groups(model, weight_decay, "adamw_master")
    return MasterWeightsAdamW(groups, lr=lr, betas=_pair(betas), eps=eps, weight_decay=weight_decay)


def adamw_offload(
    model: nn.Module, *, lr: NonNegativeFloat, weight_decay: NonNegativeFloat, betas: Betas, eps: PositiveFloat
) -> Optimizer:
    """Returns AdamW with moments in host memory. The CPU updates host copies of the weights.

    Raises: ValueError if the model is not on a GPU.
    """
    groups = parameter_groups(model, weight_decay)
    devices = {p.device.type for group in groups for p in group["params"]}
    if devices != {"cuda"}:
        raise ValueError(f"optimizer=adamw_offload needs a model on a CUDA GPU; got {', '.join(sorted(devices))}")
    from fa_train.optim.low_memory import OffloadedAdamW

    return OffloadedAdamW(groups, lr=lr, betas=_pair(betas), eps=eps)


KINDS: dict[OptimizerKind, Callable[..., Optimizer]] = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "adamw_bf16": adamw_bf16,
    "adamw_master": adamw_master,
    "adamw_offload": adamw_offload,
}


def kind_of(optimizer: Callable[..., Optimizer]) -> OptimizerKind | None:
    """Returns the name of the function in this file that makes the optimizer. Returns None for a user's own optimizer.

    optimizer: a function of this file, a functools.partial of such a function, or any other callable.
    """
    function = optimizer.func if isinstance(optimizer, partial) else optimizer
    return next((kind for kind, own in KINDS.items() if function is own), None)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters that require gradients into two groups, with and without weight decay.

    Raises: ValueError as require_trainable.
    """
    require_trainable(model)
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and "position_embedding" not in name
            (decayed if is_matrix else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def require_trainable(model: nn.Module, *, has_stored_dtype: bool = False) -> None:
    """Raises: ValueError if a parameter that requires gradients is fp16, because its small updates would be lost.

    has_stored_dtype: whether the weights have the checkpoint's dtype because model.dtype is null.
    """
    if any(parameter.dtype is torch.float16 for parameter in model.parameters() if parameter.requires_grad):
        got = "null, which keeps the checkpoint's float16. Set model.dtype=float32" if has_stored_dtype else "float16"
        raise ValueError(f"model.dtype must be float32 or bfloat16 for weights that are trained; got {got}")


def _bf16_groups(model: nn.Module, weight_decay: float, optimizer: str) -> list[dict[str, Any]]:
    """Returns `parameter_groups`.

    Raises: ValueError if a trained weight is not bf16. optimizer: the optimizer's name, for the error message.
    """
    groups = parameter_groups(model, weight_decay)
    others = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]} - {"bfloat16"}
    if others and any(not p.requires_grad for p in model.parameters()):
        raise ValueError(f"optimizer={optimizer} cannot train adapters, which are fp32; choose optimizer=adamw")
    if others:
        raise ValueError(
            f"optimizer={optimizer} needs bfloat16 weights (trainer.precision=bf16-true); "
            f"got {', '.join(sorted(others))}"
        )
    return groups


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    """Converts betas from OmegaConf's list to a tuple, because the optimizer's state must not contain that list."""
    first, second = (float(beta) for beta in betas)
    return first, second
