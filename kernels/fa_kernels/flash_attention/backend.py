"""Which kernels take a call: Hopper's where they can, the portable ones everywhere else.

The environment variable FLASH_ATTENTION_BACKEND forces one: `portable`, or `hopper`, which then raises a ValueError on
a call that it cannot take. `auto`, the default, chooses.
"""

import os
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor
from triton.knobs import getenv

from fa_kernels.flash_attention.checks import require_consistent
from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import choose as hopper_bwd
from fa_kernels.flash_attention.hopper.forward import kernel as hopper_fwd
from fa_kernels.flash_attention.portable import backward as portable_bwd
from fa_kernels.flash_attention.portable import forward as portable_fwd
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.tiles import precision_of
from fa_kernels.launch.record import replayed

VARIABLE = "FLASH_ATTENTION_BACKEND"
CHOICES = ("auto", "portable", "hopper")


def forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q (total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse fp32.

    Tokens may have two dimensions, (batch, seqlen), which o has then too. q, k and v are `in_order`.
    Raises: ValueError as require_consistent.
    """
    tensors = q, k, v, features.sinks, features.descale, *features.alibi
    o, lse = replayed(
        ("forward", out_dtype, schedule.length_class, *_kind(tensors, schedule, features)),
        (*tensors, *schedule[:7]),
        lambda: _forward(q, k, v, schedule, features, out_dtype),
    )
    return o, lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    require_consistent(q, k, v, features.sinks)
    tokens = q.shape[:-2]
    q, k, v = packed(q), packed(k), packed(v)
    supported = hopper_fwd.supports(q, k, v, features, out_dtype)
    on_hopper = _takes_hopper(supported, "forward", hopper_fwd.FORWARD_TILES, q, v)
    attention_forward = hopper_fwd.attention_forward if on_hopper else portable_fwd.attention_forward
    o, lse = attention_forward(q, k, v, schedule, features, out_dtype)
    return o.view(*tokens, *o.shape[1:]), lse


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """do like o, lse and dlse (n_heads, total_q) fp32 -> dq, dk, dv, dense, like q, k, v, and delta.

    All but lse and dlse are as for forward; delta is attention_delta's, and None without sinks, which alone need it.
    deterministic takes kernels where each output has one owner, as those of the portable ones have in any case, or is
    summed in one order.
    """
    tensors = do, q, k, v, o, lse, dlse, *features.alibi
    dq, dk, dv, *delta = replayed(
        ("backward", deterministic, features.sinks is None, *_kind(tensors, schedule, features)),
        (*tensors, *schedule[:7]),
        lambda: _backward(do, dlse, q, k, v, o, lse, schedule, features, deterministic),
    )
    return dq, dk, dv, delta[0] if delta else None


def _backward(
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
    shapes = q.shape, k.shape, v.shape
    do, q, k, v, o = packed(do), packed(q), packed(k), packed(v), packed(o)
    supported = hopper_bwd.supports(q, k, v, features)
    delta: Tensor | None
    if _takes_hopper(supported, "backward", hopper_bwd.HEAD_DIMS, q, v):
        dq, dk, dv, delta = hopper_bwd.attention_backward(do, dlse, q, k, v, o, lse, schedule, features, deterministic)
    else:
        delta = attention_delta(o, do, dlse)
        dq, dk, dv = portable_bwd.attention_backward(do.to(q.dtype), q, k, v, lse, delta, schedule, features)
    gradients = tuple(x.view(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))
    if features.sinks is None:
        return gradients
    assert delta is not None
    return *gradients, delta


def in_order(x: Tensor) -> Tensor:
    """x, or a copy, of which `packed` makes no other: tokens stand behind one another, a head's numbers side by side.

    Shapes: (tokens, heads, head_dim) or (batch, seqlen, heads, head_dim).
    """
    if x.stride(-1) == 1 and (x.dim() == 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def packed(x: Tensor) -> Tensor:
    """(batch, seqlen, heads, head_dim), or packed already -> (tokens, heads, head_dim)."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def _kind(tensors: Sequence[Tensor | None], schedule: Schedule, features: Features) -> tuple[Hashable, ...]:
    """All that launches depend on but addresses, for `replayed`: what _forward, _backward and all below them ask for.

    A schedule's tensors are int32, dense and on one device, so that only how many tiles there are can differ. Strides
    of what is contiguous follow from its shape, but for those of one step, which lead nowhere.
    """
    x = tensors[1]  # q or k, which are of one dtype
    assert x is not None
    return (
        *[None if t is None else (t.dtype, t.get_device(), t.shape, t.is_contiguous() or t.stride()) for t in tensors],
        schedule.key_start.get_device(),
        schedule.query_tiles.numel(),
        schedule.key_tiles.numel(),
        schedule.wide_query_tiles.numel(),
        schedule.crosses_documents,
        features.softmax_scale,
        features.softcap,
        getenv(VARIABLE),  # in a tenth of os.environ's time
        precision_of(x) if x.dtype == torch.float32 else None,
    )


def _takes_hopper(supported: bool, direction: str, head_dims: Iterable[int], q: Tensor, v: Tensor) -> bool:
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}; got {choice}")
    if choice == "hopper" and not supported:
        widths = ", ".join(map(str, head_dims))
        raise ValueError(
            f"{VARIABLE}=hopper needs sm_90, bfloat16 or float16, one head_dim of {widths}, no ALiBi, rows that TMA "
            f"can read, and at head_dim 256 an o of q's dtype; the {direction} got {q.dtype} of head_dim "
            f"{q.shape[-1]} and {v.shape[-1]} on {q.device}"
        )
    return supported and choice != "portable"
