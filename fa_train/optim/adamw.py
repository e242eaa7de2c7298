"""AdamW and its variants with smaller states, and which parameters they decay."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from fa_train.bounds import Betas, NonNegativeFloat
from fa_train.optim.resume import with_own_settings


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
