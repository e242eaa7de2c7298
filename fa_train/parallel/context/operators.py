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

from fa_kernels.rows import add_rows, copy_rows
from fa_train.parallel.context.traffic import Counts

_GROUPS: dict[str, ProcessGroup] = {}
_span_of_wait: Callable[[], AbstractContextManager[object]] = nullcontext  # set by surround_waits


def new_context_group(ranks: Sequence[int]) -> ProcessGroup:
    """Creates the process group of a context group. All ranks of the run must call this function, in the same order.

    With NCCL, the group's exchanges run in a CUDA stream of high priority. Without high priority, an exchange would
    wait until a running kernel of another stream ends. With high priority, the exchange begins as soon as one program
    (thread block) of the running kernel ends.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group: Any = dist.new_group(ranks, pg_options=options)
    return group


def register_group(name: str, group: ProcessGroup) -> None:
    """Makes a process group known to the operators under a name. Replaces an earlier group of the same name."""
    _GROUPS[name] = group


@contextmanager
def surround_waits(span: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While `surround_waits` is active, each wait for an exchange runs inside the context manager `span()`.

    On a GPU, the current CUDA stream waits for the exchange, and the host does not wait. On a CPU, the host waits for
    the exchange. Several threads call `span`, because autograd runs the backward pass of a GPU in a separate thread.
    """
    global _span_of_wait
    outer, _span_of_wait = _span_of_wait, span
    try:
        yield
    finally:
        _span_of_wait = outer


class Moves(NamedTuple):
    """The fields of Traffic that say which rows to move, as tensors. Traffic describes each field.

    `sizes` (2, ranks) and `counts` (8,) are int64 tensors on the CPU. If `sizes` and `counts` were lists of integers,
    torch.compile would compile the model again for each new value.
    """

    crossing: Tensor
    sent: Tensor
    kept: Tensor
    kept_rows: Tensor
    taken: Tensor
    summed: Tensor
    entries: Tensor
    offsets: Tensor
    sizes: Tensor
    counts: Tensor

    def read_counts(self) -> Counts:
        return Counts(*self.counts.tolist())


class Exchange(NamedTuple):
    """An exchange that has begun. `leaving` holds the rows to send, and must not be freed before the exchange ends.

    parts: for each exchanged tensor, a tensor whose first rows receive the rows of other ranks.
    """

    work: dist.Work
    leaving: Tensor
    parts: Sequence[Tensor]

    def wait(self) -> None:
        with _span_of_wait():
            self.work.wait()


@torch.library.custom_op("fa_train::gather_keys", mutates_args=())
def gather_keys(x: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    """Returns a buffer of the keys that this rank's queries see.

    The buffer holds rows of x from all ranks, in stream order, followed by zeros.
    Shapes: x (local, heads, head_dim) -> (capacity, heads, head_dim). moves: the fields of Moves.
    Raises: ValueError if Counts.splits is 1, because the buffer would then lack keys for the queries that see only this
    rank's own keys.
    """
    moved = Moves(*moves)
    if moved.read_counts().splits:
        raise ValueError("attention functions other than flash need traffic with may_split=False; got split traffic")
    return gathered([x], moved, moved.taken.shape[0], group)[0]


@gather_keys.register_fake
def _(x: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    return x.new_empty(Moves(*moves).taken.shape[0], *x.shape[1:])


@torch.library.custom_op("fa_train::return_gradients", mutates_args=())
def return_gradients(d: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    """Returns the gradients of this rank's rows, summed over all ranks.

    This operator computes the gradient of gather_keys.
    Shapes: d (capacity, heads, head_dim) -> (local, heads, head_dim).
    """
    return summed_gradients([d], Moves(*moves), group)[0]


@return_gradients.register_fake
def _(d: Tensor, moves: Sequence[Tensor], group: str) -> Tensor:
    return d.new_empty(Moves(*moves).kept.shape[0], *d.shape[1:])


def _save_moves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, moves, ctx.group = inputs
    ctx.save_for_backward(*moves)


def _return_gradients(ctx: Any, d: Tensor) -> tuple[Any, ...]:
    moves = ctx.saved_tensors
    return return_gradients(d, moves, ctx.group), [None] * len(moves), None


gather_keys.register_autograd(_return_gradients, setup_context=_save_moves)


def start_gathering(xs: Sequence[Tensor], moves: Moves, group: str) -> Exchange:
    """Begins to send rows of each tensor to other ranks, and to receive rows from other ranks.

    Shapes: xs (local, heads, head_dim). The tensors may have different numbers of heads.
    """
    sends, receives = moves.sizes.tolist()
    leaving, parts = _joined(xs, sum(sends))
    copy_rows(xs, parts, from_rows=moves.sent[: sum(sends)])
    arriving, parts = _joined(xs, sum(receives))
    work = dist.all_to_all_single(arriving, leaving, receives, sends, group=_GROUPS[group], async_op=True)
    assert work is not None  # because of async_op
    return Exchange(work, leaving, parts)


def gathered(
    xs: Sequence[Tensor], moves: Moves, n_rows: int, group: str, exchange: Exchange | None = None
) -> list[Tensor]:
    """Returns a buffer of n_rows rows for each tensor, filled as in gather_keys. The host does not wait for the device.

    This rank's own rows are copied while the rows of other ranks are sent.
    Shapes: (local, heads, head_dim) -> (n_rows, heads, head_dim). All tensors have the same shape. exchange: the result
    of start_gathering for the same tensors, or None to begin the exchange here.
    """
    if exchange is None:
        exchange = start_gathering(xs, moves, group)
    buffers = with_own_rows(xs, moves, n_rows)
    receive(exchange, buffers, moves)
    return buffers


def with_own_rows(xs: Sequence[Tensor], moves: Moves, n_rows: int) -> list[Tensor]:
    """Returns the buffers that `gathered` returns, but without the rows of other ranks. See `receive`."""
    counts = moves.read_counts()
    whole = xs[0].new_empty(len(xs), n_rows, *xs[0].shape[1:])
    whole[:, counts.keys :].zero_()
    buffers = list(whole.unbind())
    copy_rows(xs, buffers, from_rows=moves.kept[: counts.kept], to_rows=moves.kept_rows[: counts.kept])
    return buffers


def receive(exchange: Exchange, buffers: Sequence[Tensor], moves: Moves) -> None:
    """Waits until `exchange` ends, and copies the received rows into the buffers."""
    exchange.wait()
    copy_rows(exchange.parts, buffers, to_rows=moves.taken[: exchange.parts[0].shape[0]])


def summed_gradients(
    ds: Sequence[Tensor], moves: Moves, group: str, totals: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Returns the gradients of this rank's rows for each tensor.

    Sums are computed in fp32, always in the same order, and rounded once to the dtype of `ds`.
    ds: one gradient for each buffer that `gathered` has returned.
    totals: for each tensor, the gradients of this rank's rows from attention calls that read the tensor itself, and not
    its buffer. If all attention calls read buffers, `totals` is None. `totals` is updated in place and returned. If
    `totals` is None, the function returns new tensors.
    Shapes: (n_rows, heads, head_dim) -> (local, heads, head_dim).
    """
    counts = moves.read_counts()
    exchange = start_returning(ds, moves, group, 0 if totals is None else counts.kept)
    return finish_returning(exchange, ds, moves, totals)


def start_returning(ds: Sequence[Tensor], moves: Moves, group: str, own_rows: int = 0) -> Exchange:
    """Begins the exchange of `summed_gradients`.

    own_rows: the number of extra rows after the received rows in each part of the result. These rows are uninitialised
    until `finish_returning` stores the gradients of this rank's own tokens there.
    """
    sends, receives = moves.sizes.tolist()
    leaving, parts = _joined(ds, sum(receives))
    copy_rows(ds, parts, from_rows=moves.taken[: sum(receives)])
    arriving, parts = _joined(ds, sum(sends) + own_rows)
    arriving = arriving[: sum(sends)]
    work = dist.all_to_all_single(arriving, leaving, sends, receives, group=_GROUPS[group], async_op=True)
    assert work is not None
    return Exchange(work, leaving, parts)


def finish_returning(
    exchange: Exchange, ds: Sequence[Tensor], moves: Moves, totals: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Returns the result of `summed_gradients`. exchange: the result of `start_returning`."""
    counts = moves.read_counts()
    rows = moves.kept_rows[: counts.kept]
    # the copies below run during the exchange
    if totals is None:  # each buffer holds all rows of this rank, without padding, in the order of its tokens
        totals = [d.new_empty(moves.kept.shape[0], *d.shape[1:]) for d in ds]
        copy_rows(ds, totals, from_rows=rows)
        for total in totals:
            total[counts.kept :].zero_()
    else:
        copy_rows(ds, [part[part.shape[0] - counts.kept :] for part in exchange.parts], from_rows=rows)
    exchange.wait()
    parts = exchange.parts
    add_rows(totals, parts, moves.summed[: counts.summed], moves.entries, moves.offsets[: counts.summed + 1])
    return list(totals)


def _joined(xs: Sequence[Tensor], n_rows: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns a new, uninitialized tensor with n_rows rows, and views of this tensor, one for each tensor in `xs`.

    The new tensor has as many heads as all tensors in `xs` together. Each view has as many heads as its tensor in `xs`.
    """
    heads = [x.shape[1] for x in xs]
    whole = xs[0].new_empty(n_rows, sum(heads), xs[0].shape[2])
    return whole, whole.split_with_sizes(heads, 1)  # Tensor.split takes more host time than split_with_sizes
