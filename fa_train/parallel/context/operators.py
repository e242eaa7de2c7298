"""Operators that exchange keys and values between the ranks of a context group.

The operators are registered with torch.library. torch.compile therefore does not break the graph at an operator, and
checkpoint policies can name operators. An operator's arguments cannot be process groups, so a group is passed by name.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fa_kernels.flash_attention.ops  # noqa: F401  registers torch.ops.flash_attention
from fa_kernels.flash_attention.schedule import WORK_TILE

_GROUPS: dict[str, ProcessGroup] = {}


def register_group(name: str, group: ProcessGroup) -> None:
    """Makes a process group known to the operators under a name. Replaces an earlier group of the same name."""
    _GROUPS[name] = group


@torch.library.custom_op("fa_train::gather_keys", mutates_args=())
def gather_keys(x: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Returns the rows of x that this rank's queries see, gathered from all ranks in stream order.

    Zeros fill the result after the last of these rows.

    Shapes: x (local, heads, head_dim) -> (total, heads, head_dim). sent, place: see Traffic. sizes: the sizes of
    Traffic as a CPU tensor, (2, ranks) int64. If `sizes` were a list of integers, a compiled model would be compiled
    again for each new size.
    """
    rows = received_rows(x, sent, place, sizes, group)
    gathered = rows.new_zeros(place.shape[0], *rows.shape[1:])
    gathered[: rows.shape[0]] = rows
    return gathered


@gather_keys.register_fake
def _(x: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    return x.new_empty(place.shape[0], *x.shape[1:])


@torch.library.custom_op("fa_train::return_gradients", mutates_args=())
def return_gradients(d: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Returns the gradients of this rank's rows, summed over all ranks. This operator is the gradient of gather_keys.

    The sum is computed in fp32 and always in the same order.
    Shapes: d (total, heads, head_dim) -> (local, heads, head_dim).
    """
    return summed_gradients(d, sent, place, sizes, group)


@return_gradients.register_fake
def _(d: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    return d.new_empty(d.shape[0] // sizes.shape[1], *d.shape[1:])


def _save_traffic(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *traffic, ctx.group = inputs
    ctx.save_for_backward(*traffic)


def _return_gradients(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return return_gradients(d, *ctx.saved_tensors, ctx.group), None, None, None, None


gather_keys.register_autograd(_return_gradients, setup_context=_save_traffic)


def received_rows(x: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Returns the rows that this rank needs, (n_keys, heads, head_dim). The host does not wait for the device."""
    sends, receives = sizes.tolist()
    received = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(received, x[sent[: sum(sends)]], receives, sends, group=_GROUPS[group])
    return received[place[: sum(receives)]]


def summed_gradients(d: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Returns the summed gradients of this rank's rows.

    d: (n_keys or more, heads, head_dim), one row per gathered key.
    """
    sends, receives = sizes.tolist()
    n_keys = sum(receives)
    back = d.new_empty(n_keys, *d.shape[1:])
    back[place[:n_keys]] = d[:n_keys]
    parts = d.new_empty(sum(sends), *d.shape[1:])
    dist.all_to_all_single(parts, back, sends, receives, group=_GROUPS[group])
    local = place.shape[0] // sizes.shape[1]
    total = d.new_zeros(local, *d.shape[1:], dtype=torch.float32)
    for rows, part in zip(sent[: sum(sends)].split(sends), parts.split(sends), strict=True):
        total.index_add_(0, rows, part.float())  # no row occurs twice in `rows`, so each run adds in the same order
    return total.to(d.dtype)


@torch.library.custom_op("fa_train::context_forward", mutates_args=())
def context_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Sequence[Tensor],
    sent: Tensor,
    place: Tensor,
    sizes: Tensor,
    group: str,
    softmax_scale: float,
    softcap: float,
    length_class: str,
) -> tuple[Tensor, Tensor]:
    """Gathers keys and values, and computes flash attention of this rank's queries.

    Shapes: q (local, n_heads, head_dim), k and v (local, n_kv_heads, head_dim) -> o like q, lse (n_heads, local) fp32.
    """
    keys, values = _gathered(k, v, sent, place, sizes, group)
    return torch.ops.flash_attention.forward(
        q, keys, values, of_keys(schedule, keys.shape[0]), [], None, None, softmax_scale, softcap, q.dtype, False,
        True, length_class,
    )  # fmt: skip


@context_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("fa_train::context_backward", mutates_args=())
def context_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedule: Sequence[Tensor],
    sent: Tensor,
    place: Tensor,
    sizes: Tensor,
    group: str,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers keys and values again, computes dq, dk and dv, and returns dk and dv to the ranks that hold the keys."""
    keys, values = _gathered(k, v, sent, place, sizes, group)
    dq, dk, dv, _ = torch.ops.flash_attention.backward(
        do.contiguous(), None, q, keys, values, o, lse, of_keys(schedule, keys.shape[0]), [], None, softmax_scale,
        softcap, deterministic, True,
    )  # fmt: skip
    del keys, values
    gathered = torch.cat([dk, dv], dim=1)
    del dk, dv
    dk, dv = summed_gradients(gathered, sent, place, sizes, group).chunk(2, dim=1)
    return dq, dk.contiguous(), dv.contiguous()


@context_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, schedule, sent, place, sizes, ctx.group, ctx.softmax_scale, ctx.softcap, _ = inputs
    ctx.deterministic = torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output, sent, place, sizes, *schedule)
    ctx.set_materialize_grads(False)


def _context_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, sent, place, sizes, *schedule = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    gradients = context_backward(
        do, q, k, v, o, lse, schedule, sent, place, sizes, ctx.group, ctx.softmax_scale, ctx.softcap, ctx.deterministic
    )
    return *gradients, [None] * len(schedule), *[None] * 7


context_forward.register_autograd(_context_backward, setup_context=_save_for_backward)


def _gathered(k: Tensor, v: Tensor, sent: Tensor, place: Tensor, sizes: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Returns the keys and values that this rank's queries see, (n_keys, n_kv_heads, head_dim) twice."""
    keys, values = received_rows(torch.cat([k, v], dim=1), sent, place, sizes, group).chunk(2, dim=1)
    return keys.contiguous(), values.contiguous()


def of_keys(schedule: Sequence[Tensor], n_keys: int) -> list[Tensor]:
    """Returns a schedule's tensors, but without the entries of keys that this rank did not receive.

    Only tensors with one entry per key or per tile of keys change.
    """
    key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = schedule
    tiles = key_tiles[: -(-n_keys // WORK_TILE)]  # tiles of keys that no query sees come last
    return [key_start, key_end, query_start[:n_keys], query_end[:n_keys], query_tiles, tiles, wide_query_tiles]
