"""The operators that torch knows: fakes for tracing, autograd, FLOP formulas. No arithmetic.

Registered as torch.ops.flash_attention.forward and .backward, so that torch.compile does not break the graph at them
and activation-checkpoint policies can name them. A Schedule travels as its six tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.flash_attention.portable.bwd import attention_backward
from kernels.flash_attention.portable.delta import attention_delta
from kernels.flash_attention.portable.fwd import attention_forward
from kernels.flash_attention.schedule import Schedule


@torch.library.custom_op("flash_attention::forward", mutates_args=())
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Sequence[Tensor], softmax_scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k, v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse (n_heads, total_q)."""
    return attention_forward(q, k, v, Schedule.from_tensors(schedule), softmax_scale, out_dtype)


@flash_attention_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, schedule: Sequence[Tensor], softmax_scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total, n_heads, _ = q.shape
    o = q.new_empty(total, n_heads, v.shape[-1], dtype=out_dtype)
    return o, q.new_empty(n_heads, total, dtype=torch.float32)


@torch.library.custom_op("flash_attention::backward", mutates_args=())
def flash_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Sequence[Tensor],
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both outputs -> dq, dk, dv, dense."""
    delta = attention_delta(o, do, dlse)
    return attention_backward(do.to(q.dtype), q, k, v, lse, delta, Schedule.from_tensors(schedule), softmax_scale)


@flash_attention_backward.register_fake
def _backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Sequence[Tensor],
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, schedule, softmax_scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output, *schedule)
    ctx.softmax_scale = softmax_scale
    ctx.set_materialize_grads(False)


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    q, k, v, o, lse, *schedule = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    elif do.stride(-1) != 1:
        do = do.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv = flash_attention_backward(do, dlse, q, k, v, o, lse, schedule, ctx.softmax_scale)
    return dq, dk, dv, [None] * len(schedule), None, None


flash_attention_forward.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.flash_attention.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Every query with every key, as torch counts its own: masks live on the GPU, out of a counter's sight."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (q_shape[2] + v_shape[2])


@register_flop_formula(torch.ops.flash_attention.backward)
def _backward_flops(do_shape, dlse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Five products: scores again, dP and dV of the values' width, dQ and dK of the keys'."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (3 * q_shape[2] + 2 * v_shape[2])
