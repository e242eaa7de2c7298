"""Operators that exchange keys and values between the ranks of a context group.

The operators are registered with torch.library. torch.compile therefore does not break the graph at an operator, and
checkpoint policies can name operators. An operator's arguments cannot be process groups, so a group is passed by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fa_kernels.flash_attention.ops  # noqa: F401  registers torch.ops.flash_attention
from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.rows import add_rows, copy_rows

_GROUPS: dict[str, ProcessGroup] = {}
_span_of_wait: Callable[[], AbstractContextManager[object]] = nullcontext  # set by surround_waits


def register_group(name: str, group: ProcessGroup) -> None:
    """Makes a process group known to the operators under a name. Replaces an earlier group of the same name."""
    _GROUPS[name] = group


@contextmanager
def surround_waits(span: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Within this context, each wait for an exchange runs inside `with span()`.

    On a GPU, the current stream waits and the host does not. On a CPU, the host waits. Several threads call `span`,
    because autograd runs the backward pass of a GPU in a separate thread.
    """
    global _span_of_wait
    outer, _span_of_wait = _span_of_wait, span
    try:
        yield
    finally:
        _span_of_wait = outer


class Moves(NamedTuple):
    """The fields of Traffic that say which rows to move, as tensors. See Traffic for their meaning.

    `sizes` (2, ranks) and `counts` (3,) are int64 tensors on the CPU. As lists of integers, they would make
    torch.compile compile the model again for each new value.
    """

    sent: Tensor
    own: Tensor
    taken: Tensor
    shared: Tensor
    entries: Tensor
    offsets: Tensor
    sizes: Tensor
    counts: Tensor


@torch.library.custom_op("fa_train::gather_keys", mutates_args=())
def gather_keys(x: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    """Returns a buffer of the keys that this rank's queries see.

    The buffer holds rows of x from all ranks, in stream order. Zeros follow these rows.
    Shapes: x (local, heads, head_dim) -> (capacity, heads, head_dim). moves: the fields of Moves.
    """
    moved = Moves(*moves)
    return gathered([x], moved, moved.taken.shape[0], group)[0]


@gather_keys.register_fake
def _(x: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    return x.new_empty(Moves(*moves).taken.shape[0], *x.shape[1:])


@torch.library.custom_op("fa_train::return_gradients", mutates_args=())
def return_gradients(d: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    """Returns the gradients of this rank's rows, summed over all ranks. This operator is the gradient of gather_keys.

    Shapes: d (capacity, heads, head_dim) -> (local, heads, head_dim).
    """
    return summed_gradients([d], Moves(*moves), group)[0]


@return_gradients.register_fake
def _(d: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    return d.new_empty(Moves(*moves).own.shape[0], *d.shape[1:])


def _save_moves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, moves, ctx.group = inputs
    ctx.save_for_backward(*moves)


def _return_gradients(ctx: Any, d: Tensor) -> tuple[Any, ...]:
    moves = ctx.saved_tensors
    return return_gradients(d, moves, ctx.group), [None] * len(moves), None


gather_keys.register_autograd(_return_gradients, setup_context=_save_moves)


def gathered(xs: Sequence[Tensor], moves: Moves, n_rows: int, group: str) -> list[Tensor]:
    """Returns a buffer of n_rows rows for each tensor, filled as in gather_keys. The host does not wait for the device.

    This rank's own rows are copied while the rows of other ranks are sent.
    Shapes: (local, heads, head_dim) -> (n_rows, heads, head_dim).
    """
    sends, receives = moves.sizes.tolist()
    leaving, parts = _joined(xs, sum(sends))
    copy_rows(xs, parts, from_rows=moves.sent[: sum(sends)])
    arriving, parts = _joined(xs, sum(receives))
    exchange = dist.all_to_all_single(arriving, leaving, receives, sends, group=_GROUPS[group], async_op=True)
    buffers = [x.new_empty(n_rows, *x.shape[1:]) for x in xs]
    copy_rows(xs, buffers, to_rows=moves.own)
    for buffer in buffers:
        buffer[moves.counts[2].item() :].zero_()  # also clears the last row, where copy_rows has put padding tokens
    with _span_of_wait():
        exchange.wait()
    del leaving
    copy_rows(parts, buffers, to_rows=moves.taken[: sum(receives)])
    return buffers


def summed_gradients(ds: Sequence[Tensor], moves: Moves, group: str) -> list[Tensor]:
    """Returns the gradients of this rank's rows for each tensor. The sums are in fp32, always in the same order.

    ds: the gradients of the buffers. Shapes: (n_rows, heads, head_dim) -> (local, heads, head_dim).
    """
    sends, receives = moves.sizes.tolist()
    leaving, parts = _joined(ds, sum(receives))
    copy_rows(ds, parts, from_rows=moves.taken[: sum(receives)])
    arriving, parts = _joined(ds, sum(sends))
    exchange = dist.all_to_all_single(arriving, leaving, sends, receives, group=_GROUPS[group], async_op=True)
    results = [d.new_empty(moves.own.shape[0], *d.shape[1:]) for d in ds]
    copy_rows(ds, results, from_rows=moves.own)  # runs during the exchange
    with _span_of_wait():
        exchange.wait()
    del leaving
    n_shared = moves.counts[1].item()
    add_rows(results, parts, moves.shared[:n_shared], moves.entries, moves.offsets[: n_shared + 1])
    return results


def _joined(xs: Sequence[Tensor], n_rows: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns a new, uninitialized tensor with n_rows rows, and views of this tensor, one for each tensor in `xs`.

    The new tensor has as many heads as all tensors in `xs` together. Each view has as many heads as its tensor in `xs`.
    """
    heads = [x.shape[1] for x in xs]
    whole = xs[0].new_empty(n_rows, sum(heads), xs[0].shape[2])
    return whole, whole.split(heads, dim=1)


@torch.library.custom_op("fa_train::context_forward", mutates_args=())
def context_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    moves: Sequence[Tensor],
    group: str,
    softmax_scale: float,
    softcap: float,
    length_class: str,
    head_groups: int,
) -> tuple[Tensor, Tensor]:
    """Gathers keys and values, and computes flash attention of this rank's queries.

    Shapes: q (local, n_heads, head_dim), k and v (local, n_kv_heads, head_dim) -> o like q, lse (n_heads, local) fp32.
    alibi, sinks: as in fa_kernels.flash_attention.features.Features. `aligned` in alibi holds buffer rows. head_groups:
    the number of groups of KV heads; only the keys and values of one group are gathered at a time.
    """
    moved = Moves(*moves)
    n_keys = int(moved.counts[0])
    schedule = of_keys(schedule, n_keys)

    def of_group(queries: slice, kv: slice) -> tuple[Tensor, Tensor]:
        keys, values = gathered([k[:, kv], v[:, kv]], moved, n_keys, group)
        return torch.ops.flash_attention.forward(
            q[:, queries], keys, values, schedule, _alibi_of(alibi, queries), None if sinks is None else sinks[queries],
            None, softmax_scale, softcap, q.dtype, False, True, length_class,
        )  # fmt: skip

    groups = groups_of_heads(q.shape[1], k.shape[1], head_groups)
    if head_groups == 1:
        return of_group(*groups[0])
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for queries, kv in groups:
        o[:, queries], lse[queries] = of_group(queries, kv)
    return o, lse


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
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    moves: Sequence[Tensor],
    group: str,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    head_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gathers keys and values again, computes dq, dk, dv and dsinks, and returns dk and dv to the ranks that hold the
    keys.

    dsinks is (n_heads,), or empty without sinks. head_groups: as for context_forward.
    """
    moved = Moves(*moves)
    n_keys = int(moved.counts[0])
    schedule = of_keys(schedule, n_keys)

    def of_group(queries: slice, kv: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = gathered([k[:, kv], v[:, kv]], moved, n_keys, group)
        dq, dk, dv, dsinks = torch.ops.flash_attention.backward(
            do[:, queries].contiguous(), None, q[:, queries], keys, values, o[:, queries].contiguous(), lse[queries],
            schedule, _alibi_of(alibi, queries), None if sinks is None else sinks[queries], softmax_scale, softcap,
            deterministic, True,
        )  # fmt: skip
        del keys, values
        dk, dv = summed_gradients([dk, dv], moved, group)
        return dq, dk, dv, dsinks

    groups = groups_of_heads(q.shape[1], k.shape[1], head_groups)
    if head_groups == 1:
        return of_group(*groups[0])
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsinks = []
    for queries, kv in groups:
        dq[:, queries], dk[:, kv], dv[:, kv], dsinks_of_group = of_group(queries, kv)
        dsinks.append(dsinks_of_group)
    return dq, dk, dv, torch.cat(dsinks)


@context_backward.register_fake
def _(
    do: Tensor,
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, schedule, alibi, sinks, moves, ctx.group, ctx.softmax_scale, ctx.softcap, _, ctx.head_groups = inputs
    ctx.deterministic = torch.are_deterministic_algorithms_enabled()
    ctx.n_schedule = len(schedule)
    ctx.save_for_backward(q, k, v, *output, sinks, *moves, *schedule, *alibi)
    ctx.set_materialize_grads(False)


def _context_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, sinks, *rest = ctx.saved_tensors
    n_moves = len(Moves._fields)
    moves, schedule, alibi = rest[:n_moves], rest[n_moves:][: ctx.n_schedule], rest[n_moves + ctx.n_schedule :]
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv, dsinks = context_backward(
        do, q, k, v, o, lse, schedule, alibi, sinks, moves, ctx.group, ctx.softmax_scale, ctx.softcap,
        ctx.deterministic, ctx.head_groups,
    )  # fmt: skip
    return (
        dq, dk, dv, [None] * len(schedule), [None] * len(alibi), None if sinks is None else dsinks,
        [None] * len(moves), *[None] * 5,
    )  # fmt: skip


context_forward.register_autograd(_context_backward, setup_context=_save_for_backward)


def groups_of_heads(n_heads: int, n_kv_heads: int, groups: int) -> list[tuple[slice, slice]]:
    """Returns the query heads and the KV heads of each group. All groups have equally many heads.

    Raises: ValueError if the KV heads cannot be divided equally.
    """
    if n_kv_heads % groups:
        raise ValueError(f"strategy.head_groups must divide the {n_kv_heads} KV heads; got {groups}")
    queries, kv = n_heads // groups, n_kv_heads // groups
    return [(slice(i * queries, (i + 1) * queries), slice(i * kv, (i + 1) * kv)) for i in range(groups)]


def _alibi_of(alibi: Sequence[Tensor], heads: slice) -> list[Tensor]:
    """Returns the tensors of Features.alibi for the query heads in `heads`."""
    return [alibi[0][:, heads].contiguous(), *alibi[1:]] if alibi else []


def of_keys(schedule: Sequence[Tensor], n_keys: int) -> list[Tensor]:
    """Returns the tensors of a schedule, shortened to the first n_keys keys.

    Only tensors with one entry per key or per tile of keys become shorter.
    """
    key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = schedule
    tiles = key_tiles[: -(-n_keys // WORK_TILE)]  # tiles of keys that no query sees come last
    return [key_start, key_end, query_start[:n_keys], query_end[:n_keys], query_tiles, tiles, wide_query_tiles]
