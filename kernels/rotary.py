"""Rotary position embedding of packed heads in one pass: read once, rotated in fp32, rounded and written once.

The layout is the half-split one of Hugging Face's Llama: channel i turns with channel i + head_dim / 2 (RoFormer,
arXiv:2104.09864). Queries, keys and values that one projection wrote side by side stay so: the values are copied, so
that what autograd keeps of all three is one buffer, and their three gradients come back as one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of one program


@triton.jit(do_not_specialize=["total", "n_heads_0", "n_heads_1", "n_heads", "n_rotated"])
def _rotate_kernel(
    x_0_ptr, x_1_ptr, x_2_ptr, cos_ptr, sin_ptr, y_ptr,
    stride_0t, stride_0h, stride_1t, stride_1h, stride_2t, stride_2h, total, n_heads_0, n_heads_1, n_heads, n_rotated,
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
    rows_64, head_64 = rows.to(tl.int64)[:, None], head.to(tl.int64)
    if head < n_heads_0:
        x_ptr = x_0_ptr + head_64 * stride_0h
        stride_t = stride_0t
    elif head < n_heads_0 + n_heads_1:
        x_ptr = x_1_ptr + (head_64 - n_heads_0) * stride_1h
        stride_t = stride_1t
    else:
        x_ptr = x_2_ptr + (head_64 - n_heads_0 - n_heads_1) * stride_2h
        stride_t = stride_2t
    x_ptrs = x_ptr + rows_64 * stride_t + cols[None, :]
    y_ptrs = y_ptr + (rows_64 * n_heads + head) * (2 * HALF) + cols[None, :]
    first = tl.load(x_ptrs, mask=mask, other=0.0)
    second = tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    if head < n_rotated:
        angles = rows_64 * HALF + cols[None, :]
        cos = tl.load(cos_ptr + angles, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
        if INVERSE:
            sin = -sin
        a, b = first.to(tl.float32), second.to(tl.float32)
        tl.store(y_ptrs, a * cos - b * sin, mask=mask)
        tl.store(y_ptrs + HALF, b * cos + a * sin, mask=mask)
    else:
        tl.store(y_ptrs, first, mask=mask)
        tl.store(y_ptrs + HALF, second, mask=mask)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Turns all heads of x by each token's angles.

    Shapes: x (total, n_heads, head_dim); cos and sin (total, head_dim / 2), fp32, dense.
    Returns the same shape, dense, in `dtype`, None being x's. Differentiable in x, to any order.
    Raises: ValueError on shapes that do not fit.
    """
    _require_angles(x, cos, sin)
    result: Tensor = _rotate([x], cos, sin, x.shape[1], dtype or x.dtype, False)
    return result


def rotate_and_split(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned by each token's angles, and the values as they are.

    Shapes: qkv (total, n_heads + 2 n_kv_heads, head_dim), of which `heads` are the queries', keys' and values'; cos and
    sin (total, head_dim / 2), fp32, dense.
    Returns three views of one dense tensor of qkv's shape. Differentiable in qkv, to any order.
    Raises: ValueError on shapes that do not fit.
    """
    _require_angles(qkv, cos, sin)
    if len(heads) != 3 or min(heads) < 0 or sum(heads) != qkv.shape[1]:
        raise ValueError(f"heads must be those of q, k and v, {qkv.shape[1]} in all; got {tuple(heads)}")
    q, k, v = _RotateAndSplit.apply(qkv, cos, sin, heads)
    return q, k, v


def _require_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    total, _, head_dim = x.shape
    if head_dim % 2 or cos.shape != (total, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be (total, head_dim / 2) of x (total, n_heads, head_dim) with an even head_dim; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
        )


class _RotateAndSplit(torch.autograd.Function):
    """Autograd's own gradient of a split is a copy that joins its parts; here the pass that turns them does."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.n_rotated = heads[0] + heads[1]
        turned: Tensor = _rotate([qkv], cos, sin, ctx.n_rotated, qkv.dtype, False)
        return turned.split(list(heads), dim=1)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotate([dq, dk, dv], *ctx.saved_tensors, ctx.n_rotated, dq.dtype, True), None, None, None


@torch.library.custom_op("rotary::rotate", mutates_args=())
def _rotate(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    """The heads of one to three tensors side by side, the first n_rotated turned, with `inverse` the other way."""
    total, _, head_dim = parts[0].shape
    if not cos.is_cuda:
        return _rotate_plainly(parts, cos, sin, n_rotated, dtype, inverse)
    y = torch.empty(total, _count(parts), head_dim, dtype=dtype, device=cos.device)
    if y.numel():
        _launch(parts, cos, sin, y, n_rotated, inverse)
    return y


def _launch(parts: Sequence[Tensor], cos: Tensor, sin: Tensor, y: Tensor, n_rotated: int, inverse: bool) -> None:
    total, n_heads, head_dim = y.shape
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    block_m = BLOCK // (2 * block_d)
    dense = [x if x.stride(2) == 1 else x.contiguous() for x in parts]
    x_0, x_1, x_2 = [*dense, dense[0], dense[0]][:3]  # of those that are not there no head is left
    _rotate_kernel[(triton.cdiv(total, block_m) * n_heads,)](
        x_0, x_1, x_2, cos, sin, y,
        x_0.stride(0), x_0.stride(1), x_1.stride(0), x_1.stride(1), x_2.stride(0), x_2.stride(1),
        total, x_0.shape[1], x_1.shape[1], n_heads, n_rotated,
        INVERSE=inverse, HALF=half, BLOCK_D=block_d, BLOCK_M=block_m,
    )  # fmt: skip


def _rotate_plainly(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    """The same in torch, for the CPU."""
    x = torch.cat(list(parts), dim=1)
    first, second = x[:, :n_rotated].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(dtype), x[:, n_rotated:].to(dtype)), dim=1)


def _count(parts: Sequence[Tensor]) -> int:
    return sum(x.shape[1] for x in parts)


@_rotate.register_fake
def _fake(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    total, _, head_dim = parts[0].shape
    return cos.new_empty(total, _count(parts), head_dim, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, cos, sin, ctx.n_rotated, _, ctx.inverse = inputs
    ctx.heads, ctx.dtype = [x.shape[1] for x in parts], parts[0].dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[list[Tensor] | None, ...]:
    d_parts = _rotate([dy], *ctx.saved_tensors, ctx.n_rotated, ctx.dtype, not ctx.inverse).split(ctx.heads, dim=1)
    return list(d_parts), None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)
