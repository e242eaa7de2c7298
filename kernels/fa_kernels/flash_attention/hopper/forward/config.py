"""How the forward kernel works a call: one frozen configuration for each head_dim and length of documents.

The choices are the best on balance of what was tried on an H200 (docs/hopper.md):

- Short items: a persistent grid hides the start and the end of a program (`dynamic`).
- Consumers that visit all blocks of a tile together may alternate on the tensor cores (`pingpong`). For short documents
  each visits the blocks that its own 64 queries see (`ranged`).
- Three consumers read K and V less often than two, which head_dim 64 needs, but their tiles of 192 queries waste many
  blocks on shorter documents.
- Registers during the softmax: scores, probabilities, and usually P of the block before, which P V reads. Where three
  consumers have no room for it, they wait for P V first (`pv_first`), or need no scores beside P (`max_first`).
- At head_dim 256 shared memory has no room for o, so it leaves through the buffer of Q (`o_in_q`).
"""

from dataclasses import dataclass, replace
from typing import Literal

from fa_kernels.flash_attention.schedule import LengthClass

ROWS = 64  # queries of one consumer: what one warpgroup's tensor-core instruction holds


@dataclass(frozen=True)
class ForwardConfig:
    """`consumers` times 64 queries by block_n keys, with `stages` blocks of K and of V in flight.

    order: the schedule's tensor of tiles. dynamic: programs take items from a queue. ranged: a consumer visits only the
    blocks that its own rows see. pingpong: consumers alternate on the tensor cores. max_first, pv_first: the softmax
    takes maxima before exponentials, and waits for P V of the block before (softmax.py). o_in_q: o leaves through Q's
    buffer.
    """

    block_n: int
    consumers: int
    stages: int
    order: Literal["query_tiles", "wide_query_tiles"]
    dynamic: bool = True
    ranged: bool = False
    pingpong: bool = False
    max_first: bool = False
    pv_first: bool = False
    o_in_q: bool = False

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread: in consumers, in the producer, and when the kernel starts. All warps' fit in an SM's 64K."""
        return (240, 24, 168) if self.consumers == 2 else (160, 32, 128)


# by head_dim
FORWARD_CONFIGS = {
    64: ForwardConfig(128, 2, 3, "query_tiles", pingpong=True),
    96: ForwardConfig(128, 2, 3, "query_tiles", pingpong=True),
    128: ForwardConfig(128, 2, 2, "query_tiles", pingpong=True),
    256: ForwardConfig(64, 2, 2, "query_tiles", pingpong=True, o_in_q=True),
}
_LONG = {
    64: ForwardConfig(128, 3, 3, "wide_query_tiles", pingpong=True, pv_first=True),
    96: ForwardConfig(64, 3, 6, "wide_query_tiles", pingpong=True, pv_first=True),
}
WIDE_O_STAGES = 4  # at most, if o is fp32
# where these are faster; document lengths are those of schedule.length_class_of
OTHER_CONFIGS: dict[LengthClass, dict[int, ForwardConfig]] = {
    "short": {
        64: ForwardConfig(64, 3, 4, "wide_query_tiles", ranged=True, max_first=True),
        96: ForwardConfig(64, 2, 4, "query_tiles", ranged=True),
        128: ForwardConfig(64, 2, 4, "query_tiles", ranged=True),
        256: ForwardConfig(64, 2, 2, "query_tiles", ranged=True, o_in_q=True),
    },
    "medium": {
        256: ForwardConfig(64, 2, 2, "query_tiles", dynamic=False, pingpong=True, max_first=True, o_in_q=True),
    },
    "long": _LONG,
    "very_long": _LONG | {128: ForwardConfig(128, 2, 2, "query_tiles")},
}


def forward_config(head_dim: int, length_class: LengthClass, wide_o: bool = False) -> ForwardConfig:
    """The configuration of a call. wide_o: o is fp32."""
    config = OTHER_CONFIGS[length_class].get(head_dim, FORWARD_CONFIGS[head_dim])
    return replace(config, stages=min(config.stages, WIDE_O_STAGES)) if wide_o else config
