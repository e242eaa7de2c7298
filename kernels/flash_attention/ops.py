"""The operators that torch knows: fakes for tracing, autograd, FLOP formulas. No arithmetic.

Registered as torch.ops.flash_attention.forward and .backward, so that torch.compile does not break the graph at them
and activation-checkpoint policies can name them. A Schedule travels as its seven tensors, ALiBi as none or three.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.flash_attention import backend
from kernels.flash_attention.features import Features
from kernels.flash_attention.portable.delta import attention_delta, sink_gradient
from kernels.flash_attention.schedule import DocumentLength, Schedule


@torch.library.custom_op("flash_attention::forward", mutates_args=())
def forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    descale: Tensor | None,
    softmax_scale: float,
    softcap: float,
    out_dtype: torch.dtype,
    deterministic: bool,
    several_documents: bool,
    documents: str,
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k, v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse (n_heads, total_q).

    deterministic is for the gradients: those outputs are repeatable in any case. several_documents and documents are
    the schedule's.
    """
    features = Features(softmax_scale, softcap, sinks, alibi, descale)
    full_schedule = Schedule.from_tensors(schedule, several_documents, cast(DocumentLength, documents))
    return backend.forward(q, k, v, full_schedule, features, out_dtype)


@forward_operator.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    descale: Tensor | None,
    softmax_scale: float,
    softcap: float,
    out_dtype: torch.dtype,
    deterministic: bool,
    several_documents: bool,
    documents: str,
) -> tuple[Tensor, Tensor]:
    total, n_heads, _ = q.shape
    o = q.new_empty(total, n_heads, v.shape[-1], dtype=out_dtype)
    return o, q.new_empty(n_heads, total, dtype=torch.float32)


@torch.library.custom_op("flash_attention::backward", mutates_args=())
def backward_operator(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    several_documents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both outputs -> dq, dk, dv, dense, and dsinks (n_heads,), of no elements without sinks."""
    delta = attention_delta(o, do, dlse)
    features = Features(softmax_scale, softcap, sinks, alibi)
    dq, dk, dv = backend.backward(
        do.to(q.dtype), q, k, v, lse, delta, Schedule.from_tensors(schedule, several_documents), features, deterministic
    )
    return dq, dk, dv, lse.new_empty(0) if sinks is None else sink_gradient(sinks, lse, delta)


@backward_operator.register_fake
def _backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    several_documents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output) -> None:
    q, k, v, schedule, alibi, sinks, _, *options = inputs
    ctx.softmax_scale, ctx.softcap, _, deterministic, ctx.several_documents, _ = options
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output, sinks, *schedule, *alibi)
    ctx.n_schedule = len(schedule)
    ctx.set_materialize_grads(False)


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    q, k, v, o, lse, sinks, *rest = ctx.saved_tensors
    schedule, alibi = rest[: ctx.n_schedule], rest[ctx.n_schedule :]
    if do is None:
        do = torch.zeros_like(o)
    elif do.stride(-1) != 1:
        do = do.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv, dsinks = _without_autograd(
        backward_operator,
        do, dlse, q, k, v, o, lse, schedule, alibi, sinks, ctx.softmax_scale, ctx.softcap, ctx.deterministic,
        ctx.several_documents,
    )  # fmt: skip
    none_for_lists = [None] * len(schedule), [None] * len(alibi)
    return dq, dk, dv, *none_for_lists, None if sinks is None else dsinks, *[None] * 7


forward_operator.register_autograd(_backward, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The registered formula without torch's layers around it, which flatten lists of tensors in Python."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _without_autograd(forward_operator, *inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        dq, dk, dv, _, _, *others = _backward(ctx, do, dlse)
        return dq, dk, dv, None, None, *others  # a list is no input that could have a gradient


def _without_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    """operator(*arguments), past its Python autograd layer where that has nothing to do (9 of 23 us on a CPU)."""
    if torch.is_grad_enabled():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    descale: Tensor | None,
    softmax_scale: float,
    softcap: float,
    out_dtype: torch.dtype,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """forward_operator in less host time: 120 us of an eager call with gradients, where its own autograd takes 240."""
    arguments = (
        q, k, v, schedule.tensors(), alibi, sinks, descale, softmax_scale, softcap, out_dtype, deterministic,
        schedule.several_documents, schedule.documents,
    )  # fmt: skip
    if torch.compiler.is_compiling():  # which knows operators, but not all that a Function may do
        return forward_operator(*arguments)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        return _Eager.apply(*arguments)
    return _without_autograd(forward_operator, *arguments)


@register_flop_formula(torch.ops.flash_attention.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Every query with every key, as torch counts its own: masks live on the GPU, out of a counter's sight."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (q_shape[2] + v_shape[2])


@register_flop_formula(torch.ops.flash_attention.backward)
def _backward_flops(do_shape, dlse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Five products: scores again, dP and dV of the values' width, dQ and dK of the keys'."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (3 * q_shape[2] + 2 * v_shape[2])
