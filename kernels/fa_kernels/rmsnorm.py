"""RMSNorm (arXiv:1910.07467) fused with the residual addition before it.

The forward kernel adds the output of a layer to the residual stream and normalises the sum. The backward kernel
computes the gradients of the residual stream, of the added tensor and of the weight. The gradients of
the residual stream and of the added tensor are equal, but may have different dtypes.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import multiprocessors
from fa_kernels.options import OPTIONS

ELEMENTS_PER_WARP = 1024  # number of a row's elements that each warp processes; each thread processes 32
PROGRAMS_PER_SM = 12  # backward programs per SM; each program sums the gradient of the weight over its rows


@triton.jit
def _row(ptr, row, cols, inside, DIM: tl.constexpr):
    """Loads one row as [BLOCK] in fp32."""
    return tl.load(ptr + row * DIM + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    x_ptr, added_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, eps, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program processes one row. All tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)  # int64, because 1M tokens x 2048 elements reach 2**31
    cols = tl.arange(0, BLOCK)
    inside = cols < DIM
    x = _row(x_ptr, row, cols, inside, DIM)
    added = _row(added_ptr, row, cols, inside, DIM)
    summed = (x + added).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * DIM + cols, summed, mask=inside)
    summed = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(summed * summed, axis=0) / DIM + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * DIM + cols, summed * rstd * weight, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_backward_kernel(
    d_sum_ptr, dy_ptr, x_ptr, added_ptr, weight_ptr, rstd_ptr, dx_ptr, d_added_ptr, d_weight_ptr, rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes rows in a grid-stride loop and writes a partial weight gradient.

    The forward pass computes y = weight * normed, where normed = summed * rstd and summed = x + added. Therefore,
    d_weight is the sum of dy * normed over the rows, and dx = d_sum + (d - normed * mean(d * normed)) * rstd, where
    d = dy * weight.

    added_ptr is None if x_ptr already points to the sum x + added. d_added_ptr is None if `x` and `added` have the same
    dtype, because dx is then also the gradient of `added`.
    """
    cols = tl.arange(0, BLOCK)
    inside = cols < DIM
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows - tl.program_id(0), tl.num_programs(0)):
        row = (first + tl.program_id(0)).to(tl.int64)
        summed = _row(x_ptr, row, cols, inside, DIM)
        if added_ptr is not None:
            # The sum is rounded to x's dtype, as in the forward pass.
            summed = (summed + _row(added_ptr, row, cols, inside, DIM)).to(x_ptr.dtype.element_ty).to(tl.float32)
        dy = _row(dy_ptr, row, cols, inside, DIM)
        rstd = tl.load(rstd_ptr + row)
        normed = summed * rstd
        d_weight += dy * normed
        dy *= weight
        mean = tl.sum(dy * normed, axis=0) / DIM
        dx = _row(d_sum_ptr, row, cols, inside, DIM) + (dy - normed * mean) * rstd
        tl.store(dx_ptr + row * DIM + cols, dx, mask=inside)
        if d_added_ptr is not None:
            tl.store(d_added_ptr + row * DIM + cols, dx, mask=inside)
    tl.store(d_weight_ptr + tl.program_id(0) * DIM + cols, d_weight, mask=inside)


def add_rms_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """Returns x + added in x's dtype, and weight times RMSNorm(x + added) in `dtype`.

    The norm is computed in fp32. Both results are differentiable, but have no second derivatives.
    Shapes: x and added (rows, dim), weight (dim,) -> two tensors (rows, dim).
    keep_sum: whether to save x + added for the backward pass, instead of both x and added.
    Raises: ValueError if the shapes do not fit together.
    """
    if x.dim() != 2 or added.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(
            "x, added and weight must be (rows, dim), (rows, dim) and (dim,); "
            f"got {tuple(x.shape)}, {tuple(added.shape)} and {tuple(weight.shape)}"
        )
    summed, y = _AddRMSNorm.apply(x, added, weight, eps, dtype, keep_sum)
    return summed, y


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, keep_sum: bool
    ) -> tuple[Tensor, Tensor]:
        summed, y, rstd = forward(x, added, weight, eps, dtype)
        ctx.save_for_backward(*((summed, None) if keep_sum else (x, added)), weight, rstd)
        ctx.added_dtype = added.dtype
        return summed, y

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, added, weight, rstd = ctx.saved_tensors
        dx, d_added, d_weight = backward(d_sum, dy, x, added, weight, rstd, ctx.added_dtype)
        return dx, dx if ctx.added_dtype == x.dtype else d_added, d_weight, None, None, None


@torch.library.custom_op("rmsnorm::add_forward", mutates_args=())
def forward(x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x + added, weight times RMSNorm(x + added), and 1 / (root mean square) of each row, (rows,) fp32."""
    run = _forward_by_kernel if x.is_cuda else _forward_plainly
    return run(x, added, weight, eps, dtype)


@forward.register_fake
def _empty_outputs(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape
    return x.new_empty(shape), x.new_empty(shape, dtype=dtype), x.new_empty(shape[:1], dtype=torch.float32)


@torch.library.custom_op("rmsnorm::add_backward", mutates_args=())
def backward(
    d_sum: Tensor, dy: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, rstd: Tensor, added_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `x`, `added` and `weight`.

    If `added` is None, `x` must be the sum that `forward` returned.
    If `x` and `added` have the same dtype, their gradients are equal, and the gradient of `added` is returned as an
    empty tensor.
    """
    run = _backward_by_kernel if x.is_cuda else _backward_plainly
    return run(d_sum, dy, x, added, weight, rstd, added_dtype)


@backward.register_fake
def _empty_gradients(
    d_sum: Tensor, dy: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, rstd: Tensor, added_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (0,) if added_dtype == x.dtype else x.shape
    return x.new_empty(x.shape), x.new_empty(shape, dtype=added_dtype), weight.new_empty(weight.shape)


def _forward_by_kernel(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    summed, y, rstd = outputs = _empty_outputs(x, added, weight, eps, dtype)
    rows, dim = x.shape
    if rows:
        with torch.cuda.device_of(x):  # Triton launches kernels on the current device
            _add_norm_kernel[(rows,)](
                x.contiguous(), added.contiguous(), weight.contiguous(), summed, y, rstd, eps, DIM=dim, **_block(dim),
                **OPTIONS,
            )  # fmt: skip
    return outputs


def _backward_by_kernel(
    d_sum: Tensor, dy: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, rstd: Tensor, added_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_added, d_weight = _empty_gradients(d_sum, dy, x, added, weight, rstd, added_dtype)
    rows, dim = x.shape
    programs = min(rows, PROGRAMS_PER_SM * multiprocessors(x.device))
    d_weights = weight.new_empty(programs, dim, dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(x):  # Triton launches kernels on the current device
            _add_norm_backward_kernel[(programs,)](
                d_sum.contiguous(), dy.contiguous(), x.contiguous(), None if added is None else added.contiguous(),
                weight.contiguous(), rstd, dx, d_added if d_added.numel() else None, d_weights, rows, DIM=dim,
                **_block(dim), **OPTIONS,
            )  # fmt: skip
    return dx, d_added, d_weights.sum(0).to(d_weight.dtype)


def _forward_plainly(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `forward` with torch, for the CPU."""
    summed = (x.float() + added.float()).to(x.dtype)
    wide = summed.float()
    rstd = (wide.square().mean(dim=1) + eps).rsqrt()
    return summed, F.rms_norm(wide, weight.shape, weight.float(), eps).to(dtype), rstd


def _backward_plainly(
    d_sum: Tensor, dy: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, rstd: Tensor, added_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `backward` with torch, for the CPU.

    The results are bitwise equal to autograd's results, because the order of operations is the same.
    """
    summed = x.float() if added is None else (x.float() + added.float()).to(x.dtype).float()
    rstd, dy = rstd[:, None], dy.float()
    normed, d_normed = summed * rstd, dy * weight.float()
    d_mean = -0.5 * (d_normed * summed).sum(dim=1, keepdim=True) * rstd.pow(3) / x.shape[1]
    dx = (d_sum.float() + d_normed * rstd + d_mean * (2 * summed)).to(x.dtype)
    d_added = dx.new_empty(0, dtype=added_dtype) if added_dtype == x.dtype else dx.to(added_dtype)
    return dx, d_added, (dy * normed).sum(0).to(weight.dtype)


def _block(dim: int) -> dict[str, int]:
    """Returns the launch options for rows of `dim` elements: the size of the block that holds a row, and num_warps."""
    block = triton.next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": min(max(block // ELEMENTS_PER_WARP, 1), 32)}
