"""Rotary position embedding of packed heads in one pass: read once, rotated in fp32, rounded and written once.

The layout is the half-split one of Hugging Face's Llama: channel i turns with channel i + head_dim / 2 (RoFormer,
arXiv:2104.09864). Queries, keys and values may lie side by side in one tensor: heads past the first `n_rotated` are
copied, so that what autograd keeps of all three is one buffer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of one program


@triton.jit(do_not_specialize=["total", "n_heads", "n_rotated"])
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, stride_t, stride_h, total, n_heads, n_rotated,
    INVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program turns BLOCK_M tokens of one head; y is dense.

    Programs of the same tokens follow one another, so that their angles come from memory once.
    """
    rows = tl.program_id(0) // n_heads * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    head = tl.program_id(0) % n_heads
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < total)[:, None] & (cols < HALF)[None, :]
    # int64: 1M tokens x 32 heads x 128 is past 2**31
    rows_64 = rows.to(tl.int64)[:, None]
    x_ptr += rows_64 * stride_t + head.to(tl.int64) * stride_h + cols[None, :]
    y_ptr += (rows_64 * n_heads + head) * (2 * HALF) + cols[None, :]
    first = tl.load(x_ptr, mask=mask, other=0.0)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0)
    if head < n_rotated:
        angles = rows_64 * HALF + cols[None, :]
        cos = tl.load(cos_ptr + angles, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
        if INVERSE:
            sin = -sin
        a, b = first.to(tl.float32), second.to(tl.float32)
        tl.store(y_ptr, a * cos - b * sin, mask=mask)
        tl.store(y_ptr + HALF, b * cos + a * sin, mask=mask)
    else:
        tl.store(y_ptr, first, mask=mask)
        tl.store(y_ptr + HALF, second, mask=mask)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype | None = None) -> Tensor:
    """Turns the first n_rotated heads of x by each token's angles; the others are copied.

    Shapes: x (total, n_heads, head_dim) with a dense last dimension; cos and sin (total, head_dim / 2), fp32, dense.
    Returns the same shape, dense, in `dtype`, None being x's. Differentiable in x, to any order.
    Raises: ValueError on shapes that do not fit.
    """
    total, n_heads, head_dim = x.shape
    if head_dim % 2 or cos.shape != (total, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be (total, head_dim / 2) of x (total, n_heads, head_dim) with an even head_dim; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
        )
    if not 0 <= n_rotated <= n_heads:
        raise ValueError(f"n_rotated must be between 0 and n_heads={n_heads}; got {n_rotated}")
    result: Tensor = _rotate(x, cos, sin, n_rotated, dtype or x.dtype, False)
    return result


@torch.library.custom_op("rotary::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool) -> Tensor:
    """rotate_heads, or with `inverse` by the angles' negatives: its gradient."""
    total, n_heads, head_dim = x.shape
    if not x.is_cuda:
        return _rotate_plainly(x, cos, sin, n_rotated, dtype, inverse)
    x = x if x.stride(2) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    block_m = BLOCK // (2 * block_d)
    if total:
        _rotate_kernel[(triton.cdiv(total, block_m) * n_heads,)](
            x, cos, sin, y, x.stride(0), x.stride(1), total, n_heads, n_rotated,
            INVERSE=inverse, HALF=half, BLOCK_D=block_d, BLOCK_M=block_m,
        )  # fmt: skip
    return y


def _rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool) -> Tensor:
    """The same in torch, for the CPU."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    first, second = x[:, :n_rotated].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    y[:, :n_rotated] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    y[:, n_rotated:] = x[:, n_rotated:]
    return y


@_rotate.register_fake
def _fake(x: Tensor, cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.n_rotated, _, ctx.inverse = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _rotate(dy, *ctx.saved_tensors, ctx.n_rotated, ctx.dtype, not ctx.inverse), None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)
