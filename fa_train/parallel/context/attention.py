"""Attention over a stream that several ranks share. Each rank computes the outputs of its own tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_kernels.flash_attention.schedule import LengthClass, Schedule, schedule_of_ranges
from fa_train.models.attention import Attention, flash_attention, function_of
from fa_train.parallel.context.operators import Moves, context_forward, gather_keys
from fa_train.parallel.context.traffic import Traffic


class SharedSchedule(NamedTuple):
    """The schedule of a rank's queries over its buffer of keys, and the moves that fill the buffer."""

    own: Schedule
    moves: Moves


def shared_schedule(traffic: Traffic, length_class: LengthClass) -> SharedSchedule:
    """Builds the schedule of a rank's own queries, on the device of traffic's tensors."""
    t = traffic
    own = schedule_of_ranges(t.key_start, t.key_end, t.taken.shape[0], length_class)
    sizes, counts = torch.tensor(t.sizes), torch.tensor(t.counts)
    return SharedSchedule(own, Moves(t.sent, t.own, t.taken, t.shared, t.entries, t.offsets, sizes, counts))


def unshared(attention: Any) -> Attention:
    """Returns `attention.inner` if `attention` is a ContextAttention, and otherwise `attention`."""
    return attention.inner if isinstance(attention, ContextAttention) else attention


@dataclass(frozen=True)
class ContextAttention:
    """An attention function that gathers the keys and values of other ranks before it calls another attention.

    With flash attention, gathered keys are not kept for the backward pass, but gathered again.

    inner: the attention over the gathered keys. group: the name of the process group (operators.register_group).
    """

    inner: Attention
    group: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        schedule: SharedSchedule,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Shapes: q (local, n_heads, head_dim); k, v (local, n_kv_heads, head_dim); returns the shape of q."""
        own, moves = schedule
        if function_of(self.inner) is flash_attention:
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            o, _ = context_forward(q, k, v, own.tensors(), moves, self.group, scale, softcap, own.length_class)
            return o
        keys, values = gather_keys(torch.cat([k, v], dim=1), moves, self.group).chunk(2, dim=1)
        return self.inner(q, keys, values, own, softmax_scale=softmax_scale, softcap=softcap)
