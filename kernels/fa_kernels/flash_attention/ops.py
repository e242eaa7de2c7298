"""Attention as registered operators of torch, with fake implementations, FLOP formulas and autograd.

This file does no arithmetic; backend.py runs the kernels. torch.ops.flash_attention.forward and .backward are
registered operators. torch.compile does not break the graph at registered operators, and checkpoint policies can name
them. Torch's dispatcher and registered autograd take more host time than a short attention call takes on the GPU.
`differentiable_attention` therefore uses torch's dispatcher and registered autograd only in calls that need them. The
table lists the functions that run in each kind of call:

| observed?     | gradients? | forward                                       | backward          |
|:--------------|:-----------|:----------------------------------------------|:------------------|
| no            | no         | backend.forward                               | -                 |
| no            | yes        | _Attention without functorch: backend.forward | backend.backward  |
| yes, eager    | no         | forward_operator                              | -                 |
| yes, eager    | yes        | _Attention: forward_operator                  | backward_operator |
| yes, compiled | either     | forward_operator, with registered autograd    | backward_operator |

A call is observed if a compiler, a profiler or other code outside this file could intercept or record the call's
operators (see `observed`). The backward pass calls `observed` again. Operators of torch accept no Schedule and no
Features. The registered operators receive the seven tensors of a Schedule as a list. ALiBi is passed to the operators
as a list of three tensors, or as an empty list.
"""

import math
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

_PLAIN = {Tensor, Parameter, type(None)}  # argument types that cannot override torch operators


def differentiable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    *,
    deterministic: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns o in out_dtype and lse in fp32. Both are differentiable. If wants_lse is False, lse is None.

    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim) -> o
    (total_q, n_heads, v_head_dim), lse (n_heads, total_q). If q, k and v are (batch, seqlen, heads, head_dim), o is
    (batch, seqlen_q, n_heads, v_head_dim).
    Raises: ValueError if require_consistent or require_differentiable rejects the inputs. NotImplementedError if an
    input has a forward-mode tangent.
    """
    sinks = features.sinks
    # Without an error, forward-mode tangents would be lost silently. Even the registered operator drops tangents if no
    # input requires a gradient.
    if may_have_tangents() and any(map(_has_tangent, (q, k, v, sinks))):
        raise NotImplementedError("attention's inputs must have no forward-mode tangents; got inputs with tangents")
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        q, k, v = evenly_strided(q), evenly_strided(k), evenly_strided(v)
    is_observed = observed(q, k, v, sinks)
    options = schedule, features, out_dtype, deterministic, is_observed
    differentiates = needs_gradients(q, k, v, sinks)
    if differentiates:
        require_differentiable(q, k, v)
    # The compiler understands registered operators, but not every autograd Function.
    if not differentiates or torch.compiler.is_compiling():
        o, lse = _forward(q, k, v, *options)
        return o, lse if wants_lse else None
    if is_observed:
        outputs = _Attention.apply(q, k, v, sinks, options, wants_lse)
    else:
        # A tensor may still have the wrapper of a functorch transform that has ended.
        q, k, v = without_dead_wrapper(q), without_dead_wrapper(k), without_dead_wrapper(v)
        outputs = _apply_without_functorch(q, k, v, sinks, options, wants_lse)
    return outputs if wants_lse else (outputs, None)


def evenly_strided(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if kernels cannot read x in place.

    The last dimension of the result has stride 1. All neighbouring tokens are the same distance apart in memory, even
    across sequences, so `backend.packed` can flatten the result without a copy.
    Shapes: (tokens, heads, head_dim) or (batch, seqlen, heads, head_dim).
    """
    if x.stride(-1) == 1 and (x.dim() == 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def needs_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Returns whether autograd records attention of q, k, v and sinks for a backward pass."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


def observed(q: Tensor, *others: Tensor | None) -> bool:
    """Returns whether code outside this file may need to see an attention call as a registered operator.

    `observed` returns True if a compiler, a torch mode (a FLOP counter, a checkpoint policy, fake tensors), a functorch
    transform, a trace or a profiler is active. `observed` also returns True if q is a meta tensor, or if the type of an
    argument is a tensor subclass other than Parameter. If `observed` returns False, the attention call skips torch's
    dispatcher, which saves 20 us of host time.
    """
    return (
        torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, (q, *others))) or q.is_meta or may_be_watched()
    )


_Options = tuple[Schedule, Features, torch.dtype, bool, bool]  # bools: `deterministic`, then `is_observed`


class _Attention(torch.autograd.Function):
    """Attention as an autograd Function.

    torch's `register_autograd` would compute the same gradients, but takes more host time, because it flattens lists in
    Python.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, wants_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns o, or (o, lse) if wants_lse. Each output of an autograd Function costs host time."""
        schedule, features, out_dtype, deterministic, is_observed = options
        o, lse = _forward(q, k, v, schedule, features, out_dtype, deterministic, is_observed)
        ctx.save_for_backward(q, k, v, o, lse, sinks, *features.alibi)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        # The schedule is not passed to save_for_backward, because hooks may offload saved tensors, but all layers share
        # the schedule.
        ctx.options = schedule, features.softmax_scale, features.softcap, deterministic
        ctx.set_materialize_grads(False)
        return (o, lse) if wants_lse else o

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None = None):
        q, k, v, o, lse, sinks, *alibi = ctx.saved_tensors
        schedule, softmax_scale, softcap, deterministic = ctx.options
        features = Features(softmax_scale, softcap, sinks, alibi)
        return *_gradients(do, dlse, q, k, v, o, lse, schedule, features, deterministic), None, None


_apply_without_functorch = apply_without_transforms(_Attention)  # for calls that are not observed (see `observed`)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    deterministic: bool,
    is_observed: bool,
) -> tuple[Tensor, Tensor]:
    """Computes o and lse: by the registered operator if `is_observed` is True, otherwise by a direct backend call.

    is_observed: the result of `observed`.
    """
    if not is_observed:
        return backend.forward(q, k, v, schedule, features, out_dtype)
    require_consistent(q, k, v, features.sinks)
    o, lse = forward_operator(
        q, k, v, schedule.tensors(), features.alibi, features.sinks, features.descale, features.softmax_scale,
        features.softcap, out_dtype, deterministic, schedule.crosses_documents, schedule.length_class,
    )  # fmt: skip
    return o, lse


def _gradients(
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
    """Computes dq, dk, dv and dsinks. `do` and `dlse` come from autograd, so each may be None or have any strides."""
    if do is None:
        do = torch.zeros_like(o)
    do = evenly_strided(do)
    if dlse is not None:
        dlse = dlse.contiguous()
    sinks = features.sinks
    # If gradients are enabled in a backward pass, the caller may want second derivatives, which attention does not
    # support. Autograd raises an error for second derivatives only if it has recorded backward_operator.
    if torch.is_grad_enabled() or observed(q, k, v, do, sinks):
        dq, dk, dv, dsinks = backward_operator(
            do, dlse, q, k, v, o, lse, schedule.tensors(), features.alibi, sinks, features.softmax_scale,
            features.softcap, deterministic, schedule.crosses_documents,
        )  # fmt: skip
        return dq, dk, dv, None if sinks is None else dsinks
    dq, dk, dv, *delta = backend.backward(do, dlse, q, k, v, o, lse, schedule, features, deterministic)
    return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, *delta)


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
    """Computes o in out_dtype, and lse in fp32.

    `deterministic` only affects the gradients; o and lse are always repeatable.
    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim)
    -> o (total_q, n_heads, v_head_dim), lse (n_heads, total_q). If q, k and v are (batch, seqlen, heads, head_dim), o
    is (batch, seqlen_q, n_heads, v_head_dim).
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
    *_: object,
) -> tuple[Tensor, Tensor]:
    tokens, n_heads = q.shape[:-2], q.shape[-2]
    o = q.new_empty(*tokens, n_heads, v.shape[-1], dtype=out_dtype)
    # math.prod keeps sizes symbolic, but Size.numel would make torch.compile compile again for each length
    return o, q.new_empty(n_heads, math.prod(tokens), dtype=torch.float32)


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
    """Computes dq, dk, dv and dsinks from the gradients of o and lse.

    dq, dk and dv are contiguous and have the shapes of q, k and v. dsinks is (n_heads,), or empty without sinks.
    """
    full_schedule = Schedule.from_tensors(schedule, crosses_documents)
    features = Features(softmax_scale, softcap, sinks, alibi)
    dq, dk, dv, *delta = backend.backward(do, dlse, q, k, v, o, lse, full_schedule, features, deterministic)
    return dq, dk, dv, lse.new_empty(0) if sinks is None else sink_gradient(sinks, lse, *delta)


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
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save_for_operator(ctx, inputs, output) -> None:
    q, k, v, schedule, alibi, sinks, _, ctx.softmax_scale, ctx.softcap, *others = inputs
    _, deterministic, ctx.crosses_documents, _ = others
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output, sinks, *schedule, *alibi)
    ctx.n_schedule = len(schedule)
    ctx.set_materialize_grads(False)


def _backward_of_operator(ctx, do: Tensor | None, dlse: Tensor | None):
    q, k, v, o, lse, sinks, *rest = ctx.saved_tensors
    tensors, alibi = rest[: ctx.n_schedule], rest[ctx.n_schedule :]
    schedule = Schedule.from_tensors(tensors, ctx.crosses_documents)
    features = Features(ctx.softmax_scale, ctx.softcap, sinks, alibi)
    dq, dk, dv, dsinks = _gradients(do, dlse, q, k, v, o, lse, schedule, features, ctx.deterministic)
    return dq, dk, dv, [None] * len(tensors), [None] * len(alibi), dsinks, *[None] * 7


forward_operator.register_autograd(_backward_of_operator, setup_context=_save_for_operator)


@register_flop_formula(torch.ops.flash_attention.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Counts the FLOPs of two matmuls over all pairs of a query and a key (see `_pairs`)."""
    return 2 * _pairs(q_shape, k_shape) * (q_shape[-1] + v_shape[-1])


@register_flop_formula(torch.ops.flash_attention.backward)
def _backward_flops(do_shape, dlse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Counts five matmuls: three (scores, dQ, dK) with the head_dim of k, and two (dP, dV) with the head_dim of v."""
    return 2 * _pairs(q_shape, k_shape) * (3 * q_shape[-1] + 2 * v_shape[-1])


def _pairs(q_shape: Sequence[int], k_shape: Sequence[int]) -> int:
    """Returns the number of (query, key) pairs in all heads. Masked pairs are included, as in torch's formulas.

    In a batch, the number includes only pairs within one sequence. In a packed stream, it also includes pairs of
    different documents, because shapes do not tell the lengths of documents.
    """
    *batch, seqlen_q, n_heads, _ = q_shape
    return math.prod(batch) * n_heads * seqlen_q * k_shape[-3]
