"""The memory levers of one run, as conf/memory composes them."""

from dataclasses import dataclass

from fa_train.bounds import PositiveInt
from fa_train.memory.checkpointing import Checkpointing, require_checkpointing
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.offload import Offloaded, require_offload


@dataclass(frozen=True)
class Memory:
    """What is given up for memory: time, host memory, or nothing.

    checkpointing: what each block keeps for its backward (fa_train.memory.checkpointing).
    offload: whether the hidden states between blocks wait in host memory, or "all" that blocks keep, for which they
    must compute nothing again (fa_train.memory.offload).
    mlp_chunk: tokens that pass through the FFN at a time (fa_train.memory.tiled_ffn), None for all.
    loss: the last linear layer and its cross entropy (fa_train.memory.loss).
    auto: whether train.py puts the fastest levers that fit in place of these (fa_train.memory.planner.levers).
    Raises: ValueError on an unknown checkpointing or offload, on "all" with checkpointing, and on a chunk that is not
    positive.
    """

    checkpointing: Checkpointing
    offload: Offloaded
    mlp_chunk: PositiveInt | None
    loss: LinearCrossEntropy
    auto: bool = False

    def __post_init__(self) -> None:
        require_checkpointing(self.checkpointing)
        require_offload(self.offload, self.checkpointing)
        if self.mlp_chunk is not None and self.mlp_chunk < 1:
            raise ValueError(f"memory.mlp_chunk must be at least 1 token or null; got {self.mlp_chunk}")
