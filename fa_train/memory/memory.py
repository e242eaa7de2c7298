"""The memory levers of a run: the settings in conf/memory that reduce its peak memory."""

from dataclasses import dataclass

from fa_train.bounds import PositiveInt
from fa_train.memory.checkpointing import Checkpointing, require_checkpointing
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.offload import Offloaded, require_offload


@dataclass(frozen=True)
class Memory:
    """Settings that reduce GPU memory. Some of them cost time or host memory.

    checkpointing: which activations each block keeps for its backward (fa_train.memory.checkpointing).
    offload: True moves the hidden states between blocks to host memory until the backward. "all" moves everything that
    blocks keep, and needs checkpointing="none" (fa_train.memory.offload).
    mlp_chunk: tokens per chunk of the FFN (fa_train.memory.tiled_ffn); None means no chunks.
    loss: the last linear layer and its cross entropy (fa_train.memory.loss).
    auto: train.py replaces these settings with the fastest ones that fit (fa_train.memory.planner.levers).
    Raises: ValueError if a setting is unknown or out of range, or offload="all" is combined with checkpointing.
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
