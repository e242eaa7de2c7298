"""The inputs of the memory planner: the model, the memory levers (settings that reduce memory), and the run's size."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fa_kernels.device import Arch
from fa_train.bounds import Precision
from fa_train.memory.memory import Levers
from fa_train.models.config import ModelConfig
from fa_train.optim.adamw import OptimizerKind

Buckets = Literal["none", "views", "copies"]
LINEARS = ("qkv", "out", "up", "down")  # the linear layers of a block


@dataclass(frozen=True)
class Adapters:
    """The sizes of a model's LoRA adapters (fa_train.models.lora).

    sizes: the number of elements of each low-rank matrix A and B of each adapter. All are in fp32.
    attention_rank, ffn_rank: the sum of the ranks of a block's adapters, in attention and in the FFN.
    attention_joined, ffn_joined: the number of elements of a block's joined matrices, in attention and in the FFN. For
    each linear layer, all matrices A are joined into one matrix, and all matrices B into one block-diagonal matrix.
    quantized: whether the matrices of the blocks are quantized to 4 bits.
    adapted: which of a block's linear layers have adapters: qkv, out, up, down.
    has_dropout: whether lora_dropout is above 0. Memory levers that recompute activations do not work with dropout.
    The formulas ignore dropout.
    """

    sizes: tuple[int, ...]
    attention_rank: int
    ffn_rank: int
    attention_joined: int
    ffn_joined: int
    quantized: bool
    has_dropout: bool = False
    adapted: tuple[str, ...] = LINEARS

    @property
    def plain_ffn(self) -> bool:
        """True if no linear layer of the FFN has an adapter, and the weights are not quantized."""
        return not self.quantized and not {"up", "down"} & set(self.adapted)


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """The properties of a run that determine its memory, except for the model and the memory levers.

    Units: seq_len and loss_chunk in tokens; rows is data.micro_batch_size.
    accumulates: whether a step has several micro-batches, so that a backward pass may add to existing gradients.
    adapters: the sizes of LoRA adapters, or None if all weights are trained.
    ranks: the number of GPUs over which weights, gradients and optimizer states are sharded (fa_train.parallel.fsdp),
    or 1 without sharding. reshard_after_forward, reduce_once: the settings of strategy=fsdp.
    context: the number of GPUs that share each micro-batch (fa_train.parallel.context). head_groups: the number of
    groups of KV heads (strategy.head_groups).
    buckets: how the run uses DDP's communication buckets, which together have the size of all gradients.
    With "none", the run does not use DDP, and has no buckets. With "views", the gradients are views of the buckets at
    the end of a step (gradient_as_bucket_view=true). With "copies", gradients and buckets are always separate tensors.
    arch: the GPU's architecture, from which the attention kernels are chosen.
    float8: whether the blocks' linear layers compute in float8. With float8, a run can use neither memory.mlp_chunk nor
    memory.offload=all. The formulas ignore float8.
    """

    seq_len: int
    rows: int = 1
    precision: Precision
    optimizer: OptimizerKind
    accumulates: bool
    compiled: bool
    loss_chunk: int
    adapters: Adapters | None = None
    ranks: int = 1
    context: int = 1
    head_groups: int = 1
    reshard_after_forward: bool = True
    reduce_once: bool = False
    buckets: Buckets = "none"
    arch: Arch = "sm90"
    float8: bool = False

    def __post_init__(self) -> None:
        require_precision(self.precision)

    @property
    def tokens(self) -> int:
        """The number of tokens of one micro-batch that this GPU holds."""
        return -(-self.seq_len * self.rows // self.context)

    @property
    def weight_bytes(self) -> int:
        """The bytes per element of parameters, their gradients, and the hidden states between blocks."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def gradient_bytes(self) -> int:
        """The bytes per element of trained parameters and their gradients."""
        return self.weight_bytes if self.adapters is None else 4

    @property
    def gradient_copies(self) -> int:
        """The number of copies of each gradient, which is 2 if DDP's buckets are separate tensors, and otherwise 1.

        DDP moves gradients to its buckets only in the last micro-batch of a step. In a step of several micro-batches,
        gradients and buckets are separate tensors until the last micro-batch.
        """
        return 2 if self.buckets == "copies" or (self.buckets == "views" and self.accumulates) else 1

    @property
    def gradients_in_place(self) -> bool:
        """Whether the memory of all gradients is allocated before the backward pass starts.

        If gradients_in_place is true, the backward pass computes each gradient in a temporary tensor. The temporary
        tensor is added or copied to the allocated memory of the gradient, and then freed.
        """
        return self.accumulates or self.buckets == "views"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the operands of matrix products."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    @property
    def compute_bytes(self) -> int:
        """The number of bytes per element of compute_dtype."""
        return self.compute_dtype.itemsize

    @property
    def eager(self) -> bool:
        return not self.compiled

    @property
    def mixed(self) -> bool:
        """Whether matrix products use rounded copies of the weights."""
        return self.weight_bytes != self.compute_bytes


@dataclass(frozen=True)
class Plan:
    """All inputs of the memory planner for one run."""

    model: ModelConfig
    levers: Levers
    run: RunSize


def require_precision(precision: str) -> None:
    """Raises: ValueError if `precision` is not one of the values of `Precision`."""
    known = get_args(Precision)
    if precision not in known:
        raise ValueError(f"trainer.precision must be one of {', '.join(known)}; got {precision}")
