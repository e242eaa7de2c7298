"""The memory levers: the settings in conf/memory that reduce the GPU memory of a run."""

from dataclasses import dataclass

from fa_train.bounds import PositiveInt
from fa_train.memory.checkpointing import Checkpointing, require_checkpointing
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.offload import Offloaded, require_offload


@dataclass(frozen=True)
class Levers:
    """Settings that reduce GPU memory.

    Some levers cost time or host memory. With memory=auto, train.py chooses the levers.

    checkpointing: the activations that blocks save for the backward pass (fa_train.memory.checkpointing).
    offload: with True, the hidden states between blocks are moved to host memory until the backward pass needs them.
    With "all", all large tensors that blocks save are moved, and checkpointing must be "none"
    (fa_train.memory.offload).
    mlp_chunk: the number of tokens per chunk of the FFN, or None for no chunks (fa_train.memory.tiled_ffn).
    Raises: ValueError if a setting is unknown or out of range, or if offload="all" is combined with activation
    checkpointing.
    """

    checkpointing: Checkpointing
    offload: Offloaded
    mlp_chunk: PositiveInt | None

    def __post_init__(self) -> None:
        require_checkpointing(self.checkpointing)
        require_offload(self.offload, self.checkpointing)
        if self.mlp_chunk is not None and self.mlp_chunk < 1:
            raise ValueError(f"memory.mlp_chunk must be at least 1 token or null; got {self.mlp_chunk}")

    @property
    def offloads_all(self) -> bool:
        """Whether all large tensors that blocks save are moved to host memory."""
        return self.offload == "all"


@dataclass(frozen=True)
class Memory(Levers):
    """The keys of the YAML files in conf/memory: the levers and the loss.

    loss: the last linear layer and its cross entropy (fa_train.memory.loss).
    auto: if true, train.py ignores checkpointing, offload and mlp_chunk, and uses the fastest levers that fit
    (fa_train.memory.planner.levers).
    """

    loss: LinearCrossEntropy
    auto: bool = False

    @property
    def levers(self) -> Levers:
        """The levers without the loss. The memory planner compares and replaces them."""
        return Levers(self.checkpointing, self.offload, self.mlp_chunk)
