"""Chooses the kernels of an attention call: the Hopper kernels if they support the call, else the portable kernels.

The environment variable FLASH_ATTENTION_BACKEND can be `auto` (the default), `portable` or `hopper`. The values
`portable` and `hopper` force one set of kernels. With FLASH_ATTENTION_BACKEND=hopper, a call that the Hopper
kernels do not support raises a ValueError.
"""

import os
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from triton.knobs import getenv

from fa_kernels.device import Arch
from fa_kernels.flash_attention.checks import require_consistent, require_schedule_of
from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import choose as hopper_bwd
from fa_kernels.flash_attention.hopper.forward import kernel as hopper_fwd
from fa_kernels.flash_attention.hopper.supported import DTYPES, HEAD_DIMS, supports
from fa_kernels.flash_attention.portable import backward as portable_bwd
from fa_kernels.flash_attention.portable import forward as portable_fwd
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.tiles import precision_of
from fa_kernels.launch.record import recorded

VARIABLE = "FLASH_ATTENTION_BACKEND"
CHOICES = ("auto", "portable", "hopper")


def _uses_hopper(q: Tensor, k: Tensor, v: Tensor, features: Features, out_dtype: torch.dtype | None = None) -> bool:
    """Returns whether a call runs on the Hopper kernels. out_dtype: the dtype of o, or None for a backward pass."""
    supported = supports(q, k, v, features, out_dtype or q.dtype)
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}; got {choice}")
    if choice == "hopper" and not supported:
        raise ValueError(
            f"{VARIABLE}=hopper needs sm_90, bfloat16 or float16, a head_dim of {', '.join(map(str, HEAD_DIMS))} (the "
            "same for q and v), no ALiBi, rows of adjacent elements that start at multiples of 16 bytes, and o in q's "
            f"dtype at head_dim 256; the {'forward' if out_dtype else 'backward'} pass got {q.dtype} with head_dim "
            f"{q.shape[-1]} (q) and {v.shape[-1]} (v) on {q.device}"
        )
    return supported and choice != "portable"


Description = tuple[tuple[Hashable, ...], Sequence[Tensor | None]]  # the key and the input tensors of a recorded call


def _description(
    name: str, q: Tensor, tensors: Sequence[Tensor | None], schedule: Schedule, features: Features, *options: Hashable
) -> Description:
    """Returns the key and the inputs of a recorded call (launch/record.py).

    The inputs are `tensors` and the schedule's tensors.
    The key contains all values that determine the kernel launches and the checks of checks.py. The tensors of a
    schedule are always int32, contiguous and on one device. The key therefore holds only the schedule's device and its
    numbers of tokens and tiles. The key does not hold the strides of contiguous tensors, because these strides follow
    from the shape or do not matter.
    """
    key = (
        name,
        *options,
        *[None if t is None else (t.dtype, t.get_device(), t.shape, t.is_contiguous() or t.stride()) for t in tensors],
        schedule.key_start.get_device(),
        schedule.key_start.numel(),
        schedule.query_start.numel(),
        schedule.query_tiles.numel(),
        schedule.key_tiles.numel(),
        schedule.wide_query_tiles.numel(),
        schedule.crosses_documents,
        features.softmax_scale,
        features.softcap,
        getenv(VARIABLE),  # Triton's getenv takes a tenth of the time of os.environ
        precision_of(q) if q.dtype == torch.float32 else None,
    )
    return key, (*tensors, *schedule[:7])


def _describe_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> Description:
    tensors = q, k, v, features.sinks, features.descale, *features.alibi
    return _description("forward", q, tensors, schedule, features, out_dtype, schedule.length_class)


@recorded(_describe_forward)
def forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Computes attention: o in out_dtype, and lse in fp32. q, k and v must be results of `ops.evenly_strided`.

    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim) -> o
    (total_q, n_heads, v_head_dim), lse (n_heads, total_q). If q, k and v are (batch, seqlen, heads, head_dim), o is
    (batch, seqlen_q, n_heads, v_head_dim).
    Raises: ValueError if q, k, v, sinks and schedule do not fit together (checks.py).
    """
    require_consistent(q, k, v, features.sinks)
    require_schedule_of(q, k, schedule.key_start, schedule.query_start, gradients=False)
    tokens = q.shape[:-2]
    q, k, v = packed(q), packed(k), packed(v)
    kernels = hopper_fwd if _uses_hopper(q, k, v, features, out_dtype) else portable_fwd
    o, lse = kernels.attention_forward(q, k, v, schedule, features, out_dtype)
    return o.view(*tokens, *o.shape[1:]), lse


def _describe_backward(
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
) -> Description:
    tensors = do, q, k, v, o, lse, dlse, *features.alibi
    return _description("backward", q, tensors, schedule, features, deterministic, features.sinks is None)


@recorded(_describe_backward)
def backward(
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
) -> tuple[Tensor, ...]:
    """Computes dq, dk and dv, which are contiguous. If there are sinks, the function also returns delta (delta.py).

    With `deterministic`, gradients have the same bits in every run, because programs add to each element of dq in a
    fixed order.
    Shapes: q, k, v and o are as in `forward`; do has the shape of o; lse and dlse are (n_heads, total_q) fp32.
    """
    require_schedule_of(q, k, schedule.key_start, schedule.query_start, gradients=True)
    shapes = q.shape, k.shape, v.shape
    do, q, k, v, o = packed(do), packed(q), packed(k), packed(v), packed(o)
    delta: Tensor | None
    if _uses_hopper(q, k, v, features):
        dq, dk, dv, delta = hopper_bwd.attention_backward(do, dlse, q, k, v, o, lse, schedule, features, deterministic)
    else:
        delta = attention_delta(o, do, dlse)
        dq, dk, dv = portable_bwd.attention_backward(do.to(q.dtype), q, k, v, lse, delta, schedule, features)
    gradients = tuple(x.view(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))
    if features.sinks is None:
        return gradients
    assert delta is not None
    return *gradients, delta


def _describe_preparation(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> Description:
    tensors = do, q, k, v, o, lse, *features.alibi
    return _description("prepare", q, tensors, schedule, features, deterministic, features.sinks is None)


@recorded(_describe_preparation)
def prepare_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """Computes what a backward pass can compute before the elements of k and v are known.

    `prepare_backward`, `gradients_of_keys` and `gradient_of_queries`, called in this order, are equal to one call of
    `backward`. With separate calls, other work can start in between, such as an exchange with other GPUs. The arguments
    are those of `backward`, but no tensor has a batch dimension.
    Returns the tensors to pass as `prepared` to `gradients_of_keys` and `gradient_of_queries`. `gradients_of_keys` may
    change these tensors.
    If there are sinks, the last tensor is delta (delta.py).
    """
    if _uses_hopper(q, k, v, features):
        return hopper_bwd.prepare_backward(do, None, q, o, lse, schedule, features, deterministic).tensors()
    return (attention_delta(o, do, None),)


def _describe_phase(name: str) -> Callable[..., Description]:
    def describe(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        prepared: Sequence[Tensor],
        schedule: Schedule,
        features: Features,
        deterministic: bool,
    ) -> Description:
        tensors = do, q, k, v, lse, *prepared, *features.alibi
        return _description(name, q, tensors, schedule, features, deterministic, features.sinks is None)

    return describe


@recorded(_describe_phase("gradients_of_keys"))
def gradients_of_keys(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    prepared: Sequence[Tensor],
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Returns dk and dv. See `prepare_backward`."""
    if _uses_hopper(q, k, v, features):
        return hopper_bwd.gradients_of_keys(do, q, k, v, lse, prepared, schedule, features, deterministic)
    return portable_bwd.gradients_of_keys(do.to(q.dtype), q, k, v, lse, prepared[0], schedule, features)


@recorded(_describe_phase("gradient_of_queries"))
def gradient_of_queries(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    prepared: Sequence[Tensor],
    schedule: Schedule,
    features: Features,
    deterministic: bool,
) -> tuple[Tensor]:
    """Returns a tuple with one tensor, dq. See `prepare_backward`."""
    if _uses_hopper(q, k, v, features):
        return (hopper_bwd.gradient_of_queries(do, q, k, v, lse, prepared, schedule, features, deterministic),)
    return (portable_bwd.gradient_of_queries(do.to(q.dtype), q, k, v, lse, prepared[0], schedule, features),)


def backward_workspace(head_dim: int, dtype: torch.dtype, softcap: float, arch: Arch) -> int:
    """Returns an upper bound of the temporary memory of the backward pass, in bytes per query and head.

    The portable kernels need one fp32 value, delta, per query and head. The Hopper kernels need three fp32 values per
    query and head, including delta. The fused Hopper kernel (hopper/backward/fused.py) also stores
    dQ, which has `head_dim` fp32 values per query and head.
    """
    if arch != "sm90" or dtype not in DTYPES or head_dim not in HEAD_DIMS:
        return 4
    return 4 * (3 + head_dim * hopper_bwd.uses_fused_kernel(head_dim, dtype, softcap))


def packed(x: Tensor) -> Tensor:
    """Flattens (batch, seqlen, heads, head_dim) to (tokens, heads, head_dim). If x has three dimensions, returns x."""
    return x.flatten(0, 1) if x.dim() == 4 else x
