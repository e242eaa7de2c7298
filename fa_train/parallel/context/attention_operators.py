"""Operators for flash attention over a stream that several ranks share.

Queries that see keys of other ranks are called crossing queries. fa_train.parallel.context.traffic chooses one of three
ways to compute attention:
1. If no query is a crossing query, attention runs once over the rank's own keys.
2. If each rank has few crossing queries, and the stream has enough attention work per rank, attention runs twice. The
   first run processes the queries that see only the rank's own keys, while the rank receives keys of other ranks. The
   second run processes the crossing queries, after the keys have arrived.
3. In all other cases, attention runs once for all queries, after the rank has received keys of other ranks. The first
   and the last kernel of the backward pass run during exchanges, if memory allows it (`overlaps`).

The operators are registered with torch.library, for the reasons that operators.py gives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.ops import needs_gradients, observed
from fa_kernels.flash_attention.schedule import WIDE_TILE, WORK_TILE, LengthClass, Schedule
from fa_kernels.rows import copy_rows
from fa_kernels.torch_private import apply_without_transforms, may_have_tangents, without_dead_wrapper
from fa_train.parallel.context.operators import (
    Moves,
    finish_returning,
    gathered,
    receive,
    start_gathering,
    start_returning,
    summed_gradients,
    with_own_rows,
)
from fa_train.parallel.context.runs import BackwardPhases, Run
from fa_train.parallel.context.traffic import Counts


class Options(NamedTuple):
    """The last five arguments of `context_forward`."""

    group: str
    softmax_scale: float
    softcap: float
    length_class: str
    head_groups: int


class Context(NamedTuple):
    """The arguments that a forward pass and its backward pass share. q, k, v and sinks are passed separately.

    The fields are arguments of `context_forward`.
    """

    schedules: Sequence[Tensor]
    alibi: Sequence[Tensor]
    moves: Moves
    options: Options


class _Call(NamedTuple):
    """The inputs of a forward or a backward pass, except tensors with one row per token, such as q, k and v.

    crossing: the call of flash attention with the schedule SharedSchedule.crossing. own: the call with the schedule
    SharedSchedule.own.
    """

    crossing: Run
    own: Run
    moves: Moves
    counts: Counts
    group: str

    def of_heads(self, heads: slice) -> "_Call":
        """Returns a copy of this call that processes only the query heads in `heads`."""
        return self._replace(crossing=self.crossing.of_heads(heads), own=self.own.of_heads(heads))


def shared_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> Tensor:
    """Returns o, differentiable in q, k, v and sinks. The arguments are those of `context_forward`.

    A call of a registered operator takes host time in torch's dispatcher and in autograd. shared_attention avoids this
    host time if no compiler, profiler or other code watches the call (see `observed` in
    fa_kernels.flash_attention.ops).
    """
    if observed(q, k, v, sinks) or may_have_tangents():
        schedules, alibi, moves, options = context
        o: Tensor = context_forward(q, k, v, schedules, alibi, sinks, moves, *options)[0]
        return o
    if needs_gradients(q, k, v, sinks):
        q, k, v = without_dead_wrapper(q), without_dead_wrapper(k), without_dead_wrapper(v)
        o = _apply_without_functorch(q, k, v, sinks, context)
        return o
    return _attention_forward(q, k, v, sinks, context)[0]


class _SharedAttention(torch.autograd.Function):
    """Attention as an autograd Function, for calls that skip torch's dispatcher (see `shared_attention`)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> Tensor:
        o, lse = _attention_forward(q, k, v, sinks, context)
        # The tensors in `context` are not saved with save_for_backward, because all layers share these tensors.
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.context, ctx.deterministic = context, torch.are_deterministic_algorithms_enabled()
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        schedules, alibi, moves, options = ctx.context
        # If gradients are enabled here, the caller may want second derivatives. Autograd raises an error for second
        # derivatives only if it has recorded the operator context_backward.
        if torch.is_grad_enabled() or observed(q, k, v, do, sinks):
            group, softmax_scale, softcap, _, head_groups = options
            gradients = context_backward(
                do, q, k, v, o, lse, schedules, alibi, sinks, moves, group, softmax_scale, softcap, ctx.deterministic,
                head_groups,
            )  # fmt: skip
        else:
            gradients = _attention_backward(do, q, k, v, o, lse, sinks, ctx.context, ctx.deterministic)
        dq, dk, dv, dsinks = gradients
        return dq, dk, dv, None if sinks is None else dsinks, None


_apply_without_functorch = apply_without_transforms(_SharedAttention)  # for calls that skip torch's dispatcher


@torch.library.custom_op("fa_train::context_forward", mutates_args=())
def context_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedules: Sequence[Tensor],
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
    schedules: the tensors of the schedules SharedSchedule.crossing and SharedSchedule.own.
    alibi: the ALiBi tensors of both schedules; empty without ALiBi. sinks: as in Features.
    head_groups: the number of head groups. Only the keys and values of one head group are gathered at a time.
    """
    options = Options(group, softmax_scale, softcap, length_class, head_groups)
    return _attention_forward(q, k, v, sinks, Context(schedules, alibi, Moves(*moves), options))


def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context
) -> tuple[Tensor, Tensor]:
    """Computes context_forward."""
    call, head_groups = _call_of(context, sinks), context.options.head_groups
    if head_groups == 1:
        return _forward_of_group(q, k, v, call)
    groups = groups_of_heads(q.shape[1], k.shape[1], head_groups)
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for queries, kv in groups:
        of_group = call.of_heads(queries)
        o[:, queries], lse[queries] = _forward_of_group(q[:, queries], k[:, kv], v[:, kv], of_group)
    return o, lse


def _forward_of_group(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """Returns o and lse of one head group."""
    crossing, own, moves, counts, group = call
    if not counts.exchanges:
        return own.forward(q, k, v)
    if not counts.splits:
        keys, values = gathered([k, v], moves, counts.rows, group)
        return crossing.forward(q, keys, values)
    exchange = start_gathering([k, v], moves, group)
    o, lse = own.forward(q, k, v)  # runs during the exchange
    keys, values = gathered([k, v], moves, counts.rows, group, exchange)
    del exchange  # frees the rows that were sent and received
    (crossing_q,) = _crossing_rows([q], call)
    crossing_o, crossing_lse = crossing.forward(crossing_q, keys, values)
    rows = moves.crossing[: counts.crossing]
    copy_rows([crossing_o], [o], to_rows=rows)
    lse.index_copy_(1, rows.long(), crossing_lse[:, : counts.crossing])
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
    schedules: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    moves: Sequence[Tensor],
    group: str,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    head_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gathers keys and values again, and returns dq, dk, dv and dsinks of this rank.

    Each rank sends its parts of dk and dv to the ranks that hold the keys, and these ranks sum the parts. dsinks is
    (n_heads,), or empty without sinks. The arguments are those of context_forward.
    """
    # the length class ("short" to "very_long") selects only forward kernels, so a backward pass can use any class
    options = Options(group, softmax_scale, softcap, "medium", head_groups)
    context = Context(schedules, alibi, Moves(*moves), options)
    return _attention_backward(do, q, k, v, o, lse, sinks, context, deterministic)


def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    context: Context,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes context_backward."""
    call, head_groups = _call_of(context, sinks), context.options.head_groups
    if head_groups == 1:
        return _backward_of_group(do, q, k, v, o, lse, call, deterministic)
    groups = groups_of_heads(q.shape[1], k.shape[1], head_groups)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dsinks = []
    for queries, kv in groups:
        dq[:, queries], dk[:, kv], dv[:, kv], dsinks_of_group = _backward_of_group(
            do[:, queries].contiguous(), q[:, queries], k[:, kv], v[:, kv], o[:, queries].contiguous(), lse[queries],
            call.of_heads(queries), deterministic,
        )  # fmt: skip
        dsinks.append(dsinks_of_group)
    return dq, dk, dv, torch.cat(dsinks)


def _backward_of_group(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: _Call, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv and dsinks of one head group."""
    crossing, own, moves, counts, group = call
    if not counts.exchanges:
        return own.backward(do, q, k, v, o, lse, deterministic)
    if not counts.splits:
        return _backward_in_one_run(do, q, k, v, o, lse, call, deterministic)
    exchange = start_gathering([k, v], moves, group)
    # own.backward runs while keys are exchanged. In own.backward, queries that see keys of other ranks add nothing to
    # dk and dv. But dsinks is already complete, because dsinks depends only on do, o and lse.
    dq, dk, dv, dsinks = own.backward(do, q, k, v, o, lse, deterministic)
    keys, values = gathered([k, v], moves, counts.rows, group, exchange)
    del exchange
    crossing_q, crossing_do = _crossing_rows([q, do], call)
    (crossing_o,) = _crossing_rows([o], call)
    crossing_lse = lse.index_select(1, moves.crossing[: counts.queries])
    crossing_dq, *of_buffer, _ = crossing.without_sinks().backward(
        crossing_do, crossing_q, keys, values, crossing_o, crossing_lse, deterministic
    )
    copy_rows([crossing_dq], [dq], to_rows=moves.crossing[: counts.crossing])
    del keys, values, crossing_q, crossing_do, crossing_o, crossing_lse, crossing_dq
    dk, dv = summed_gradients(of_buffer, moves, group, [dk, dv])
    return dq, dk, dv, dsinks


def _backward_in_one_run(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: _Call, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv and dsinks of one head group if all queries read the buffer of gathered keys.

    Kernels run during the exchanges if memory allows it.
    """
    run, _, moves, counts, group = call
    during_gathering, during_returning = overlaps(moves, counts)
    exchange = start_gathering([k, v], moves, group)
    keys, values = with_own_rows([k, v], moves, counts.rows)
    if not during_gathering:
        receive(exchange, [keys, values], moves)
        del exchange
        dq, dk, dv, dsinks = run.backward(do, q, keys, values, o, lse, deterministic)
        del keys, values
        dk, dv = summed_gradients([dk, dv], moves, group)
        return dq, dk, dv, dsinks
    phases = BackwardPhases(run, do, q, keys, values, o, lse, deterministic)  # launches a kernel
    receive(exchange, [keys, values], moves)
    del exchange
    of_buffer = phases.gradients_of_keys()
    returning = start_returning(of_buffer, moves, group) if during_returning else None
    dq, dsinks = phases.gradient_of_queries()
    del keys, values, phases
    dk, dv = finish_returning(returning or start_returning(of_buffer, moves, group), of_buffer, moves)
    return dq, dk, dv, dsinks


@context_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    schedules: Sequence[Tensor],
    alibi: Sequence[Tensor],
    sinks: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, schedules, alibi, sinks, moves, ctx.group, ctx.softmax_scale, ctx.softcap, _, ctx.head_groups = inputs
    ctx.deterministic = torch.are_deterministic_algorithms_enabled()
    ctx.n_schedules = len(schedules)
    ctx.save_for_backward(q, k, v, *output, sinks, *moves, *schedules, *alibi)
    ctx.set_materialize_grads(False)


def _context_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, sinks, *rest = ctx.saved_tensors
    n_moves = len(Moves._fields)
    moves, schedules, alibi = rest[:n_moves], rest[n_moves:][: ctx.n_schedules], rest[n_moves + ctx.n_schedules :]
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv, dsinks = context_backward(
        do, q, k, v, o, lse, schedules, alibi, sinks, moves, ctx.group, ctx.softmax_scale, ctx.softcap,
        ctx.deterministic, ctx.head_groups,
    )  # fmt: skip
    return (
        dq, dk, dv, [None] * len(schedules), [None] * len(alibi), None if sinks is None else dsinks,
        [None] * len(moves), *[None] * 5,
    )  # fmt: skip


context_forward.register_autograd(_context_backward, setup_context=_save_for_backward)


def groups_of_heads(n_heads: int, n_kv_heads: int, groups: int) -> list[tuple[slice, slice]]:
    """Returns the query heads and the KV heads of each head group. All head groups have equally many heads.

    Raises: ValueError if the KV heads cannot be divided equally.
    """
    if n_kv_heads % groups:
        raise ValueError(f"strategy.head_groups must divide the {n_kv_heads} KV heads; got {groups}")
    queries, kv = n_heads // groups, n_kv_heads // groups
    return [(slice(i * queries, (i + 1) * queries), slice(i * kv, (i + 1) * kv)) for i in range(groups)]


def _call_of(context: Context, sinks: Tensor | None) -> _Call:
    schedules, alibi, moves, (group, softmax_scale, softcap, length_class, _) = context
    counts = moves.read_counts()
    features = Features(softmax_scale, softcap, sinks, alibi)

    def run(schedule: Sequence[Tensor], alibi: Sequence[Tensor]) -> Run:
        whole = Schedule.from_tensors(schedule, True, cast(LengthClass, length_class))
        return Run(whole, features._replace(alibi=alibi))

    n_tensors, n_alibi = len(schedules) // 2, len(alibi) // 2
    of_crossing = list(alibi[:n_alibi])
    of_crossing[1:] = [x[: counts.queries] for x in of_crossing[1:]]
    crossing = run(used_part(schedules[:n_tensors], counts.queries, counts.rows), of_crossing)
    return _Call(crossing, run(schedules[n_tensors:], alibi[n_alibi:]), moves, counts, group)


def overlaps(moves: Moves, counts: Counts) -> tuple[bool, bool]:
    """Returns whether kernels of the backward pass may run while keys are gathered, and while gradients are returned.

    During an exchange, memory also holds the rows that this rank sends and receives. Kernels may run during an exchange
    only if the buffers and the exchanged rows fit into the memory that the memory plan counts. The plan assumes one
    document that fills the stream. Several documents usually need a smaller buffer, which leaves memory for the
    exchanged rows.
    """
    exchanged, spare = int(moves.sizes.sum()), moves.taken.shape[0] - counts.rows
    # The plan counts two full buffers: one of keys and values, one of their gradients. `counts.rows + exchanged` rows
    # exist while keys are gathered, and `2 * counts.rows + exchanged` rows while gradients are returned.
    return exchanged <= 2 * spare + counts.rows, exchanged <= 2 * spare


def _crossing_rows(xs: Sequence[Tensor], call: _Call) -> list[Tensor]:
    """Returns the rows of the crossing queries (see `Traffic`), followed by copies of row 0 whose results are not used.

    Shapes: one or two tensors (local, heads, head_dim) -> (counts.queries, heads, head_dim).
    """
    n_queries = call.counts.queries
    results = [x.new_empty(n_queries, *x.shape[1:]) for x in xs]
    copy_rows(xs, results, from_rows=call.moves.crossing[:n_queries])
    return results


def used_part(schedule: Sequence[Tensor], n_queries: int, n_keys: int) -> list[Tensor]:
    """Returns the tensors of a schedule, shortened to the first n_queries queries and the first n_keys keys.

    A tile of queries may be left out only if none of its queries sees a key. A tile of keys may be left out only if no
    query sees its keys. A schedule lists the tiles without work after all other tiles.
    """
    key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = schedule
    return [
        key_start[:n_queries],
        key_end[:n_queries],
        query_start[:n_keys],
        query_end[:n_keys],
        query_tiles[: -(-n_queries // WORK_TILE)],
        key_tiles[: -(-n_keys // WORK_TILE)],
        wide_query_tiles[: -(-n_queries // WIDE_TILE)],
    ]
