"""The operators that torch knows: fakes for tracing, autograd, FLOP formulas. No arithmetic.

Registered as torch.ops.flash_attention.forward and .backward, so that torch.compile does not break the graph at them
and activation-checkpoint policies can name them. A Schedule travels as its seven tensors, ALiBi as none or three.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.checks import require_consistent, require_differentiable
from fa_kernels.flash_attention.delta import sink_gradient
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.schedule import LengthClass, Schedule
from fa_kernels.torch_private import (
    apply_without_transforms,
    may_be_watched,
    may_have_tangents,
    without_dead_wrapper,
)

_PLAIN = {Tensor, Parameter, type(None)}  # classes that mean nothing by an operator but its numbers


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
    crosses_documents: bool,
    length_class: str,
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k, v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse (n_heads, total_q).

    deterministic is for the gradients: those outputs are repeatable in any case. crosses_documents and length_class are
    the schedule's.
    """
    features = Features(softmax_scale, softcap, sinks, alibi, descale)
    full_schedule = Schedule.from_tensors(schedule, crosses_documents, cast(LengthClass, length_class))
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
    crosses_documents: bool,
    length_class: str,
) -> tuple[Tensor, Tensor]:
    total, n_heads, _ = q.shape
    o = q.new_empty(total, n_heads, v.shape[-1], dtype=out_dtype)
    return o, q.new_empty(n_heads, total, dtype=torch.float32)


def _gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dq, dk, dv, delta = backend.backward(do, dlse, q, k, v, o, lse, schedule, features, deterministic)
    if features.sinks is None:
        return dq, dk, dv, None
    assert delta is not None
    return dq, dk, dv, sink_gradient(features.sinks, lse, delta)


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
    crosses_documents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both outputs -> dq, dk, dv, dense, and dsinks (n_heads,), of no elements without sinks."""
    full_schedule = Schedule.from_tensors(schedule, crosses_documents)
    features = Features(softmax_scale, softcap, sinks, alibi)
    dq, dk, dv, dsinks = _gradients(do, dlse, q, k, v, o, lse, full_schedule, features, deterministic)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


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
    crosses_documents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output) -> None:
    q, k, v, schedule, alibi, sinks, _, *options = inputs
    ctx.softmax_scale, ctx.softcap, _, deterministic, ctx.crosses_documents, _ = options
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output, sinks, *schedule, *alibi)
    ctx.n_schedule = len(schedule)
    ctx.set_materialize_grads(False)


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    q, k, v, o, lse, sinks, *rest = ctx.saved_tensors
    tensors, alibi = rest[: ctx.n_schedule], rest[ctx.n_schedule :]
    dq, dk, dv, dsinks = _gradients_of_inputs(
        do, dlse, q, k, v, o, lse, Schedule.from_tensors(tensors, ctx.crosses_documents),
        Features(ctx.softmax_scale, ctx.softcap, sinks, alibi), ctx.deterministic,
    )  # fmt: skip
    return dq, dk, dv, [None] * len(tensors), [None] * len(alibi), dsinks, *[None] * 7


def _gradients_of_inputs(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsinks, of gradients as autograd hands them over; q, k, v and o are as backend.forward's."""
    if do is None:
        do = torch.zeros_like(o)
    do = backend.in_order(do)
    if dlse is not None:
        dlse = dlse.contiguous()
    # where gradients of gradients are wanted, the operator says that it has none
    if not torch.is_grad_enabled() and _nobody_looks(q, k, v, do, features.sinks):
        return _gradients(do, dlse, q, k, v, o, lse, schedule, features, deterministic)
    dq, dk, dv, dsinks = backward_operator(
        backend.packed(do), dlse, *map(backend.packed, (q, k, v, o)), lse, schedule.tensors(), features.alibi,
        features.sinks, features.softmax_scale, features.softcap, deterministic, schedule.crosses_documents,
    )  # fmt: skip
    dq, dk, dv = dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
    return dq, dk, dv, None if features.sinks is None else dsinks


forward_operator.register_autograd(_backward, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The registered formula without torch's layers around it, which flatten lists of tensors in Python."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        others: tuple[Schedule, Features, torch.dtype, bool, bool],
        wants_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """o, and lse if it is wanted: each output of a Function costs time, as does each argument.

        others are what _outputs takes beside q, k and v.
        """
        o, lse = _outputs(q, k, v, *others)
        schedule, features, _, deterministic, _ = others
        ctx.save_for_backward(q, k, v, o, lse, sinks, *features.alibi)
        # all layers share the schedule: seven tensors less to save and to restore
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        ctx.options = schedule, features.softmax_scale, features.softcap, deterministic
        ctx.set_materialize_grads(False)
        return (o, lse) if wants_lse else o

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None = None):
        q, k, v, o, lse, sinks, *alibi = ctx.saved_tensors
        schedule, softmax_scale, softcap, deterministic = ctx.options
        features = Features(softmax_scale, softcap, sinks, alibi)
        return *_gradients_of_inputs(do, dlse, q, k, v, o, lse, schedule, features, deterministic), None, None


_apply_unseen = apply_without_transforms(_Eager)  # called only if `_nobody_looks`: no transform is active


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    deterministic: bool,
    unseen: bool,
) -> tuple[Tensor, Tensor]:
    """o and lse, by the operator where someone may want to see it."""
    if unseen:
        return backend.forward(q, k, v, schedule, features, out_dtype)
    require_consistent(q, k, v, features.sinks)
    o, lse = forward_operator(
        *map(backend.packed, (q, k, v)), schedule.tensors(), features.alibi, features.sinks, features.descale,
        features.softmax_scale, features.softcap, out_dtype, deterministic, schedule.crosses_documents,
        schedule.length_class,
    )  # fmt: skip
    return o.view(*q.shape[:-1], o.shape[-1]), lse


def _nobody_looks(q: Tensor, *others: Tensor | None) -> bool:
    """Whether a call may go past torch's dispatcher, which takes the host 20 us, and a Function's layer for transforms.

    It may not where someone may want to see the operator: a compiler, a mode (a count of FLOPs, a policy of
    checkpointing, fake tensors), a transform of functions, a trace, a profiler, tensors of a class of their own, or
    tensors without data.
    """
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, (q, *others)))
        and not q.is_meta
        and not may_be_watched()
    )


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    deterministic: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """forward_operator in less host time: its own autograd takes 100 us more of an eager call with gradients.

    Shapes: q (total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim), or each with (batch, seqlen) for
    its total, as has o then. lse (n_heads, total_q) is None unless it is wanted.
    Raises: ValueError as require_consistent and require_differentiable.
    """
    sinks = features.sinks
    # where nothing requires gradients, the operator too would drop tangents in silence
    if may_have_tangents() and any(map(_has_tangent, (q, k, v, sinks))):
        raise NotImplementedError("attention has no forward-mode derivative; got tangents of its inputs")
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        q, k, v = backend.in_order(q), backend.in_order(k), backend.in_order(v)
    unseen = _nobody_looks(q, k, v, sinks)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        require_differentiable(q, k, v)
        if not torch.compiler.is_compiling():  # which knows operators, but not all that a Function may do
            others = schedule, features, out_dtype, deterministic, unseen
            if unseen:
                # all that is left of a transform is what it may have wrapped before it ended
                q, k, v = without_dead_wrapper(q), without_dead_wrapper(k), without_dead_wrapper(v)
                outputs = _apply_unseen(q, k, v, sinks, others, wants_lse)
            else:
                outputs = _Eager.apply(q, k, v, sinks, others, wants_lse)
            return outputs if wants_lse else (outputs, None)
    o, lse = _outputs(q, k, v, schedule, features, out_dtype, deterministic, unseen)
    return o, lse if wants_lse else None


@register_flop_formula(torch.ops.flash_attention.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Every query with every key, as torch counts its own: masks live on the GPU, out of a counter's sight."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (q_shape[2] + v_shape[2])


@register_flop_formula(torch.ops.flash_attention.backward)
def _backward_flops(do_shape, dlse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Five products: scores again, dP and dV of the values' width, dQ and dK of the keys'."""
    return 2 * q_shape[0] * k_shape[0] * q_shape[1] * (3 * q_shape[2] + 2 * v_shape[2])
