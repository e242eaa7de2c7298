"""Dequantization of NF4 weights (QLoRA, arXiv:2305.14314) in the format of torchao's NF4Tensor.

A weight consists of blocks of elements. Each element is stored as a 4-bit code, the index of one of the 16 values in a
table. Each block has a scale. An element of the weight is its value in the table times the scale of its block. The
scales are quantized too: a scale is q / factor + mean, where q is an 8-bit integer. A group of scales shares one
factor. All scales share one mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.options import OPTIONS

BLOCK = 1024  # bytes per program; each byte holds the codes of two elements


@triton.jit
def _dequantize_kernel(
    codes_ptr, scalers_ptr, factors_ptr, mean_ptr, table_ptr, weight_ptr, n_bytes, BYTES_PER_SCALE: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program dequantizes `BLOCK` bytes. All tensors are contiguous.

    Every step rounds to the dtype of the table, as torchao does.
    """
    dtype = table_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_bytes
    scale_at = at // BYTES_PER_SCALE
    scaler = tl.load(scalers_ptr + scale_at, mask=inside, other=0).to(tl.float32)
    factor = tl.load(factors_ptr + scale_at // SCALES_PER_FACTOR, mask=inside, other=1.0).to(tl.float32)
    scale = tl.div_rn(scaler, factor).to(dtype).to(tl.float32)
    scale = (scale + tl.load(mean_ptr).to(tl.float32)).to(dtype).to(tl.float32)
    codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    first = tl.load(table_ptr + (codes >> 4)).to(tl.float32) * scale  # the high 4 bits encode the earlier element
    second = tl.load(table_ptr + (codes & 15)).to(tl.float32) * scale
    elements = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(weight_ptr + elements, tl.interleave(first, second).to(dtype), mask=elements < 2 * n_bytes)


def dequantize(
    codes: Tensor, scalers: Tensor, factors: Tensor, mean: Tensor, table: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns the elements of an NF4 weight on a GPU, (2 * n_bytes,) in `dtype`.

    The elements are computed in the dtype of `table` and then converted to `dtype`. The results equal torchao's bit for
    bit.
    Shapes: codes (n_bytes,) uint8, two codes per byte; scalers (n_scales,) int8; factors (n_factors,); mean (); table
    (16,). n_scales divides n_bytes, and n_factors divides n_scales. factors, mean and table have the same dtype: fp32,
    fp16 or bf16.
    Raises: ValueError if n_scales does not divide n_bytes, n_factors does not divide n_scales, or the table does not
    have 16 values.
    """
    n_bytes, n_scales, n_factors = codes.numel(), scalers.numel(), factors.numel()
    if not (n_scales and n_factors) or n_bytes % n_scales or n_scales % n_factors or table.shape != (16,):
        raise ValueError(
            "codes, scalers and factors must be (n_bytes,), (n_scales,) and (n_factors,), each length a divisor of the "
            f"one before, and table (16,); got {tuple(codes.shape)}, {tuple(scalers.shape)}, {tuple(factors.shape)} "
            f"and {tuple(table.shape)}"
        )
    weight = torch.empty(2 * n_bytes, dtype=dtype, device=codes.device)
    sizes = {"BYTES_PER_SCALE": n_bytes // n_scales, "SCALES_PER_FACTOR": n_scales // n_factors}
    tensors = [tensor.contiguous() for tensor in (codes, scalers, factors, mean, table)]
    with torch.cuda.device_of(codes):  # Triton launches kernels on the current device
        _dequantize_kernel[(triton.cdiv(n_bytes, BLOCK),)](*tensors, weight, n_bytes, **sizes, BLOCK=BLOCK, **OPTIONS)
    return weight
