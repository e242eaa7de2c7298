"""SwiGLU and the product after it, for compiled steps: one pass between the two products of its backward.

torch.compile makes two kernels there, which read the same numbers: one computes the activations again, for the weight's
gradient, the other the gradient of what they were computed from.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_kernels.swiglu import swiglu_gradient
from fa_train.memory.tiled_ffn import activate


def trains_plainly(linear: nn.Linear) -> bool:
    """Whether its product is that of one tensor that gets a gradient, and not of shards, codes or an adapter."""
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and linear.weight.requires_grad


def swiglu_down(projected: Tensor, down: Tensor, down_bias: Tensor | None) -> Tensor:
    """down(silu(gate) * value), which keeps `projected` for the backward and not the activations.

    Shapes: projected (total, 2 ffn_dim), the gate first; down (dim, ffn_dim); down_bias (dim,) -> (total, dim), in
    autocast's dtype, else in that of the arguments. Gradients are rounded as F.linear's.
    """
    device = projected.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        projected, down = projected.to(dtype), down.to(dtype)
        down_bias = None if down_bias is None else down_bias.to(dtype)
    y: Tensor = _SwigluDown.apply(projected, down, down_bias)
    return y


class _SwigluDown(torch.autograd.Function):
    """All arguments are of one dtype."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, down: Tensor, down_bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(projected, down)
        return F.linear(activate(projected, "swiglu"), down, down_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        projected, down = ctx.saved_tensors
        activated = dy @ down  # the gradient of the activations, until they take its place
        d_projected = swiglu_gradient(projected, activated)
        return d_projected, dy.T @ activated, dy.sum(0) if ctx.needs_input_grad[2] else None
