"""The norms of the decoder, and a residual addition that is fused with the following norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_kernels.rmsnorm import add_rms_norm
from fa_train.models.autocast import compute_dtype
from fa_train.models.config import ModelConfig


class OffsetRMSNorm(nn.Module):
    """An RMSNorm in fp32 that multiplies by 1 + weight (Gemma, arXiv:2403.08295)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., dim) -> (..., dim)."""
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


NormModule = nn.RMSNorm | nn.LayerNorm | OffsetRMSNorm


def build_norm(config: ModelConfig, dim: int) -> NormModule:
    """Builds the norm that config.norm names, over `dim` channels."""
    if config.norm == "layernorm":
        return nn.LayerNorm(dim, eps=config.norm_eps, bias=config.bias)
    return (nn.RMSNorm if config.norm == "rmsnorm" else OffsetRMSNorm)(dim, eps=config.norm_eps)


def add_and_norm(x: Tensor, added: Tensor, norm: nn.Module, *, keep_sum: bool) -> tuple[Tensor, Tensor]:
    """Returns x + added and norm(x + added), (total, dim) each. keep_sum: see fa_kernels.rmsnorm.add_rms_norm."""
    if isinstance(norm, nn.RMSNorm | OffsetRMSNorm) and type(norm.weight) is nn.Parameter and norm.eps is not None:
        weight = 1.0 + norm.weight.float() if isinstance(norm, OffsetRMSNorm) else norm.weight
        return add_rms_norm(x, added, weight, norm.eps, compute_dtype(x), keep_sum=keep_sum)
    x = x + added
    return x, norm(x)


def zeros_to_add(x: Tensor) -> Tensor:
    """Returns zeros that the first block adds to its input.

    With a deferred addition (see fa_train.models.gpt.Block), every other block adds the FFN output of the previous
    block. The first block has no previous block. It adds zeros, so that all blocks use the same compiled graph.
    """
    zero = torch.zeros((), dtype=compute_dtype(x), device=x.device, requires_grad=x.requires_grad)
    return zero.expand(x.shape).contiguous()  # the result is not a leaf, so autograd does not store its gradient
