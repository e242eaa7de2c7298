"""Linear layers whose frozen weights have 4 bits per element, in torchao's NF4 format (arXiv:2305.14314)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.nf4 import dequantize
from fa_train.private_names import TESTED

BLOCK, SCALER_BLOCK = 64, 256  # 64 elements share a scale, and up to 256 scales share a second-level scale
# the tensors of a 4-bit weight besides its codes: three tensors for the scales, and the table of values
NF4_PARTS = ("quantized_scalers", "quantization_factor", "scaler_mean", "nf4")


# nf4_matmul is an operator because torch.compile cannot trace torchao's tensor class. The dequantized weight exists
# only inside the operator, so compiled code cannot keep the weight from the forward to the backward pass.
@torch.library.custom_op("fa_train::nf4_matmul", mutates_args=())
def nf4_matmul(
    x: Tensor,
    codes: Tensor,
    quantized_scalers: Tensor,
    quantization_factor: Tensor,
    scaler_mean: Tensor,
    nf4: Tensor,
    out_features: int,
    in_features: int,
    transposed: bool,
) -> Tensor:
    """Multiplies x by a matrix W, (out_features, in_features). The backward pass dequantizes W again.

    With transposed=True, computes x W^T, as a linear layer does: (..., in_features) -> (..., out_features). Otherwise
    computes x W, as for the gradient of a linear layer's input: (..., out_features) -> (..., in_features). The tensors
    other than x are the parts of W, as in `nf4_weight`.
    """
    parts = codes, quantized_scalers, quantization_factor, scaler_mean, nf4
    weight = nf4_weight(parts, out_features, in_features, x.dtype)
    return F.linear(x, weight) if transposed else x @ weight


@nf4_matmul.register_fake
def _nf4_matmul_fake(x: Tensor, *arguments: Any) -> Tensor:
    *_, out_features, in_features, transposed = arguments
    return x.new_empty(*x.shape[:-1], out_features if transposed else in_features)


def _save_parts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *parts, ctx.out_features, ctx.in_features, ctx.transposed = inputs
    ctx.save_for_backward(*parts)


def _gradient_of_x(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = nf4_matmul(dy, *ctx.saved_tensors, ctx.out_features, ctx.in_features, not ctx.transposed)
    return dx, *[None] * 8


nf4_matmul.register_autograd(_gradient_of_x, setup_context=_save_parts)


def nf4_weight(parts: Sequence[Tensor], out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight to (out_features, in_features) in `dtype`.

    On a GPU, a kernel dequantizes the weight without temporary tensors. On the CPU, torchao dequantizes the weight.
    parts: the 4-bit codes, and the tensors of NF4_PARTS in their order.
    """
    run = _weight_by_kernel if parts[0].is_cuda else _weight_by_torchao
    return run(parts, torch.Size((out_features, in_features)), dtype)


def _weight_by_kernel(parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    codes, scalers, factors, mean, table = parts
    return dequantize(codes, scalers, factors, mean, table, dtype).view(shape)


def _weight_by_torchao(parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, SubclassTensorArgs

    codes, scalers, factors, mean, table = parts
    n_blocks = scalers.numel()
    block, scaler_block = shape.numel() // n_blocks, n_blocks // factors.numel()
    meta = SubclassTensorArgs(shape, (shape[1], 1), 0, table.dtype, table.device, False)
    tensor = NF4Tensor(meta, block, n_blocks, scaler_block, scalers, factors, mean, codes, table)
    weight: Tensor = tensor.get_original_weight().to(dtype)
    return weight


def quantized(weight: Tensor, what: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Quantizes a matrix to NF4. Returns the 4-bit codes, two per byte, and a dict with the tensors in NF4_PARTS.

    The scales are quantized as well (QLoRA's "double quantization"). With n scales, each second-level scale applies to
    a group of gcd(256, n) scales. If `weight` is on the meta device, so are the results.
    what: the weight's name, for error messages.
    Raises: ValueError if the number of elements is not a multiple of 64. Also raises the errors of require_torchao.
    """
    if weight.numel() % BLOCK:
        raise ValueError(f"adapter.quantization=nf4 needs matrices with a multiple of {BLOCK} elements; {what} has "
                         f"{weight.numel()}")  # fmt: skip
    n_blocks = weight.numel() // BLOCK
    scaler_block = math.gcd(n_blocks, SCALER_BLOCK)
    require_torchao()
    if weight.is_meta:
        with torch.device("meta"):
            return torch.empty(weight.numel() // 2, dtype=torch.uint8), {
                "quantized_scalers": torch.empty(n_blocks, dtype=torch.int8),
                "quantization_factor": torch.empty(n_blocks // scaler_block, dtype=weight.dtype),
                "scaler_mean": torch.empty((), dtype=weight.dtype),
                "nf4": torch.empty(16, dtype=weight.dtype),
            }
    from torchao.quantization import to_nf4

    tensor = to_nf4(weight.contiguous(), BLOCK, scaler_block)
    return tensor.quantized_data, {name: getattr(tensor, name) for name in NF4_PARTS}


def require_torchao() -> None:
    """Raises: ValueError if torchao is not installed, or does not have the 4-bit tensor class that QLoRA needs."""
    try:
        from torchao.quantization import to_nf4  # noqa: F401  seconds to import
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (  # noqa: F401
            NF4Tensor,
            SubclassTensorArgs,
        )
    except ImportError as error:
        wanted = f"torchao=={TESTED['torchao']}"
        raise ValueError(f"adapter.quantization=nf4 needs {wanted}; got {error}. Run `pip install {wanted}`") from error
