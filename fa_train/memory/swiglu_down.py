"""Fuses SwiGLU with the down projection in compiled models, so that the backward needs only one elementwise kernel.

Without the fusion, torch.compile makes two kernels that read the same tensors. One kernel recomputes the activations
for the gradient of the weight. The other kernel computes the gradient of SwiGLU's input.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_kernels.glu import glu_gradient
from fa_train.memory.tiled_ffn import activate
from fa_train.models.autocast import compute_dtype


def trains_plainly(linear: nn.Linear) -> bool:
    """Returns whether a layer is an nn.Linear with a trained weight.

    Returns False for sharded, quantized and LoRA layers.
    """
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and linear.weight.requires_grad


def swiglu_down(projected: Tensor, down: Tensor, down_bias: Tensor | None) -> Tensor:
    """Computes down(silu(gate) * value). Saves `projected` for the backward pass, but not the activations.

    Shapes: projected (total, 2 * ffn_dim) holds gate and then value; down (dim, ffn_dim); down_bias (dim,); returns
    (total, dim). The result has autocast's dtype, or the arguments' dtype without autocast. The gradients are rounded
    in the same way as those of F.linear.
    """
    dtype = compute_dtype(projected)
    down_bias = None if down_bias is None else down_bias.to(dtype)
    y: Tensor = _SwigluDown.apply(projected.to(dtype), down.to(dtype), down_bias)
    return y


class _SwigluDown(torch.autograd.Function):
    """The autograd function of `swiglu_down`. All arguments must have the same dtype."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, down: Tensor, down_bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(projected, down)
        return F.linear(activate(projected, "swiglu"), down, down_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        projected, down = ctx.saved_tensors
        # `activated` holds the gradient of the activations before glu_gradient runs, and the activations afterwards
        activated = dy @ down
        d_projected = glu_gradient(projected, activated, "swiglu")
        return d_projected, dy.T @ activated, dy.sum(0) if ctx.needs_input_grad[2] else None
