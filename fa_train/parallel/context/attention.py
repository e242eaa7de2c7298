"""Attention over a stream that several ranks share. Each rank computes the outputs of its own tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_kernels.flash_attention.checks import described, softcap_of
from fa_kernels.flash_attention.schedule import LengthClass, Schedule, schedule_of_ranges
from fa_train.models.attention import Attention, flash_attention, function_of
from fa_train.parallel.context.attention_operators import Context, Options, shared_attention
from fa_train.parallel.context.operators import Moves, gather_keys
from fa_train.parallel.context.traffic import Counts, Traffic


class SharedSchedule(NamedTuple):
    """The two attention schedules of a rank's queries, and the moves that fill the rank's buffer of keys (traffic.py).

    crossing: the schedule of the queries whose keys are in the buffer. The schedule `crossing` ends with padding
    entries, which are treated as queries that see no key.
    own: the schedule of all queries of the rank over the rank's own keys. If attention runs twice, the first run uses
    `own`, the second run uses `crossing`, and no query sees keys in both runs.
    """

    crossing: Schedule
    own: Schedule
    moves: Moves


def shared_schedule(traffic: Traffic, length_class: LengthClass) -> SharedSchedule:
    """Builds both schedules of a rank from the rank's traffic, on the device of the tensors in `traffic`."""
    t = traffic
    crossing = schedule_of_ranges(t.key_start, t.key_end, t.taken.shape[0], length_class)
    # the first n_crossing entries of `crossing` are queries that read the buffer; all later entries are padding
    n_crossing = Counts(*t.counts).crossing
    crossing = crossing._replace(
        query_start=crossing.query_start.clamp(max=n_crossing), query_end=crossing.query_end.clamp(max=n_crossing)
    )
    own = schedule_of_ranges(t.own_start, t.own_end, t.kept.shape[0], length_class)
    sizes, counts = torch.tensor(t.sizes), torch.tensor(t.counts)
    moves = Moves(t.crossing, t.sent, t.kept, t.kept_rows, t.taken, t.summed, t.entries, t.offsets, sizes, counts)
    return SharedSchedule(crossing, own, moves)


def unshared(attention: Any) -> Attention:
    """Returns `attention.inner` if `attention` is a ContextAttention, and otherwise `attention`."""
    return attention.inner if isinstance(attention, ContextAttention) else attention


@dataclass(frozen=True)
class ContextAttention:
    """An attention function that also sees the keys and values of other ranks.

    If `inner` is flash attention, the backward pass gathers keys and values again instead of keeping them in memory
    (shared_attention). Any other `inner` is called with keys and values that gather_keys has gathered.

    inner: an attention function of fa_train.models.attention. group: the name of the process group
    (operators.register_group). head_groups: the number of head groups. Flash attention gathers the keys and values of
    one head group at a time. With more head groups, each group is smaller, so less memory is needed.
    """

    inner: Attention
    group: str
    head_groups: int = 1

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        schedule: SharedSchedule,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Shapes: q (local, n_heads, head_dim); k, v (local, n_kv_heads, head_dim); returns the shape of q.

        sinks, alibi_slopes: (n_heads,) fp32, as in fa_kernels.flash_attention.interface.flash_attn_func. Each rank
        computes only its part of the gradient of sinks, so the caller must sum this gradient over the group. Only flash
        attention supports sinks, alibi_slopes and head_groups > 1.
        Raises: ValueError if an argument is not supported, `schedule` is not a SharedSchedule, alibi_slopes has a wrong
        shape, dtype or device, or head_groups does not divide the KV heads. Also raises ValueError if Counts.splits is
        1 and `inner` is not flash attention. If the function fa_train.parallel.context.traffic.traffic is called with
        may_split=False, Counts.splits is 0.
        """
        if not isinstance(schedule, SharedSchedule):
            raise ValueError(
                "a model whose ranks share their streams needs the traffic of the batch, from GPT.context_shard; got a "
                f"{type(schedule).__name__} without traffic"
            )
        crossing, own, moves = schedule
        if function_of(self.inner) is flash_attention:
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            alibi = [] if alibi_slopes is None else [*_alibi(alibi_slopes, q, crossing), *_alibi(alibi_slopes, q, own)]
            sinks = None if sinks is None else sinks.contiguous()  # kernels assume that sinks is contiguous
            options = Options(self.group, scale, softcap_of(softcap), own.length_class, self.head_groups)
            context = Context([*crossing.tensors(), *own.tensors()], alibi, moves, options)
            return shared_attention(q, k, v, sinks, context)
        if sinks is not None or alibi_slopes is not None or self.head_groups > 1:
            raise ValueError(f"sinks, alibi_slopes and head_groups need attention=flash; got {self.inner}")
        keys, values = gather_keys(torch.cat([k, v], dim=1), moves, self.group).chunk(2, dim=1)
        return self.inner(q, keys, values, crossing, softmax_scale=softmax_scale, softcap=softcap)


def _alibi(slopes: Tensor, q: Tensor, schedule: Schedule) -> list[Tensor]:
    """Returns the tensors that Features.alibi needs.

    The last key that a query sees is the key of the query's own token.
    """
    if slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32 or slopes.device != q.device:
        raise ValueError(f"alibi_slopes must be ({q.shape[1]},) float32 on {q.device}; got {described(slopes)}")
    return [slopes[None].contiguous(), schedule.key_end - 1, torch.zeros_like(schedule.key_end)]
