"""Rotary position embedding (RoFormer, arXiv:2104.09864) of packed heads.

One kernel reads each element once, rotates it in fp32, rounds it and writes it once. Channel i is paired with channel i
+ head_dim / 2, as in Hugging Face's Llama. The kernel writes queries, keys and values side by side into one tensor, so
that autograd saves one buffer for q, k and v. The kernel rotates the first `n_rotated` heads, and copies the other
heads unchanged. The backward pass joins the gradients of q, k and v into one tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.options import OPTIONS

BLOCK = 4096  # elements per program


@triton.jit
def _select(head, k_head, v_head, q, k, v):
    """Returns the one of q, k and v to which the head with the index `head` belongs.

    k_head is the index of k's first head, and v_head is the index of v's first head.
    """
    return tl.where(head < k_head, q, tl.where(head < v_head, k, v))


@triton.jit(do_not_specialize=["total", "q_heads", "k_heads", "n_heads", "n_rotated"])
def _rotate_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, y_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    total, q_heads, k_heads, n_heads, n_rotated,
    INVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program rotates BLOCK_M tokens of one head of q, k or v.

    y is contiguous and holds the heads of q, then the heads of k, then the heads of v. Programs for the same tokens
    have consecutive ids, so that cos and sin of these tokens stay in the cache.
    """
    rows = tl.program_id(0) // n_heads * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    head = tl.program_id(0) % n_heads
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < total)[:, None] & (cols < HALF)[None, :]
    # offsets are int64, because 1M tokens x 32 heads x 128 elements exceed 2**31
    rows_64 = rows.to(tl.int64)[:, None]
    v_head = q_heads + k_heads
    x_ptr = _select(head, q_heads, v_head, q_ptr, k_ptr, v_ptr)
    stride_t = _select(head, q_heads, v_head, q_stride_t, k_stride_t, v_stride_t)
    stride_h = _select(head, q_heads, v_head, q_stride_h, k_stride_h, v_stride_h)
    x_head = head - _select(head, q_heads, v_head, 0, q_heads, v_head)
    x_ptr += rows_64 * stride_t + x_head.to(tl.int64) * stride_h + cols[None, :]
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
    """Rotates the first n_rotated heads of x by each token's angles, and copies the other heads.

    Returns a contiguous tensor of x's shape in `dtype`, by default x's dtype. The result is differentiable in x, to any
    order.
    Shapes: x (total, n_heads, head_dim), with a last dimension of stride 1; cos and sin (total, head_dim / 2), fp32,
    contiguous.
    Raises: ValueError if the shapes do not fit together, or if n_rotated exceeds n_heads.
    """
    _require_angles(x, cos, sin)
    if not 0 <= n_rotated <= x.shape[1]:
        raise ValueError(f"n_rotated must be between 0 and n_heads={x.shape[1]}; got {n_rotated}")
    result: Tensor = _rotate([x], cos, sin, n_rotated, dtype or x.dtype, False)
    return result


def rotate_qkv(qkv: Tensor, heads: Sequence[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k rotated by each token's angles, and v unchanged. q, k and v are views of one new buffer.

    The results are differentiable in qkv, to any order. `heads` is (n_heads, n_kv_heads, n_kv_heads), the numbers of
    heads of q, k and v.
    Shapes: qkv (total, n_heads + 2 n_kv_heads, head_dim) -> q (total, n_heads, head_dim); k and v (total, n_kv_heads,
    head_dim). The last dimension of qkv must have stride 1. cos and sin have the shape (total, head_dim / 2), and must
    be fp32 and contiguous.
    Raises: ValueError if the shapes do not fit together.
    """
    _require_angles(qkv, cos, sin)
    if len(heads) != 3 or sum(heads) != qkv.shape[1]:
        raise ValueError(
            f"heads must be the numbers of heads of q, k and v, and add up to the {qkv.shape[1]} heads of qkv; "
            f"got {tuple(heads)}"
        )
    q, k, v = _RotateQKV.apply(qkv, tuple(heads), cos, sin)
    return q, k, v


def _require_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    total, _, head_dim = x.shape
    if head_dim % 2 or cos.shape != (total, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be (total, head_dim / 2) of x (total, n_heads, head_dim) with an even head_dim; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
        )


@torch.library.custom_op("rotary::rotate", mutates_args=())
def _rotate(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    """Joins the one or three tensors in `parts` along the head dimension, and rotates the first n_rotated heads.

    If `inverse`, rotates by the negated angles, as the gradient of a rotation requires.
    """
    if not parts[0].is_cuda:
        return _rotate_plainly(parts, cos, sin, n_rotated, dtype, inverse)
    y = _empty(parts, cos, sin, n_rotated, dtype, inverse)
    total, n_heads, head_dim = y.shape
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    block_m = BLOCK // (2 * block_d)
    if total:
        with torch.cuda.device_of(y):  # Triton launches kernels on the current device
            _rotate_kernel[(triton.cdiv(total, block_m) * n_heads,)](
                *_arguments(parts, cos, sin, n_rotated, y),
                INVERSE=inverse, HALF=half, BLOCK_D=block_d, BLOCK_M=block_m, **OPTIONS,
            )  # fmt: skip
    return y


def _arguments(parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, y: Tensor) -> list[Any]:
    """Returns the kernel's arguments.

    If `parts` has only one tensor, the kernel gets this tensor as q, k and v, but reads only q.
    """
    dense = [x if x.stride(2) == 1 else x.contiguous() for x in parts]
    q, k, v = dense if len(dense) == 3 else dense * 3
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    return [q, k, v, cos, sin, y, *strides, y.shape[0], q.shape[1], k.shape[1], y.shape[1], n_rotated]


def _rotate_plainly(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    """Computes `_rotate` with torch, for the CPU."""
    x, y = torch.cat(list(parts), dim=1), _empty(parts, cos, sin, n_rotated, dtype, inverse)
    first, second = x[:, :n_rotated].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    y[:, :n_rotated] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    y[:, n_rotated:] = x[:, n_rotated:]
    return y


@_rotate.register_fake
def _empty(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, n_rotated: int, dtype: torch.dtype, inverse: bool
) -> Tensor:
    total, _, head_dim = parts[0].shape
    return torch.empty((total, sum(x.shape[1] for x in parts), head_dim), dtype=dtype, device=parts[0].device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, cos, sin, ctx.n_rotated, _, ctx.inverse = inputs
    ctx.heads, ctx.dtype = [x.shape[1] for x in parts], parts[0].dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[list[Tensor] | None, ...]:
    dx = _rotate([dy], *ctx.saved_tensors, ctx.n_rotated, ctx.dtype, not ctx.inverse)
    return list(dx.split(ctx.heads, dim=1)), None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)


class _RotateQKV(torch.autograd.Function):
    """Rotates qkv and splits it into q, k and v. The backward kernel reads dq, dk and dv as separate tensors.

    If rotation and split were separate operations, autograd would first join the gradients in an additional pass over
    memory.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.n_rotated = heads[0] + heads[1]
        ctx.save_for_backward(cos, sin)
        return _rotate([qkv], cos, sin, ctx.n_rotated, qkv.dtype, False).split(heads, dim=1)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate([dq, dk, dv], *ctx.saved_tensors, ctx.n_rotated, dq.dtype, True), None, None, None
