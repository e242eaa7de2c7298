"""The numbers that decide a run's memory."""

from dataclasses import dataclass
from typing import Literal, get_args

from fa_train.memory.checkpointing import Checkpointing, require_checkpointing
from fa_train.memory.offload import Offloaded, require_offload

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_bf16", "adamw_offload"]
Activation = Literal["swiglu", "geglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class Adapters:
    """What LoRA trains while the model's own weights are frozen (fa_train.models.lora).

    sizes: the elements of each matrix A and B, all fp32. attention_rank, ffn_rank: numbers between A and B that a block
    has for each token. attention_joined, ffn_joined: elements of a block's A and B as they are multiplied, those of
    parts of one matrix joined. quantised: whether the blocks' matrices are in 4 bits.
    """

    sizes: tuple[int, ...]
    attention_rank: int
    ffn_rank: int
    attention_joined: int
    ffn_joined: int
    quantised: bool


@dataclass(frozen=True)
class Shape:
    """The numbers that decide a run's memory.

    Units: tokens is what one GPU holds at a time (data.micro_batch_size x seq_len); mlp_chunk and loss_chunk in tokens;
    ffn_dim, dim, head_dim in channels. accumulates: whether a step has several micro-batches, so that gradients stay
    while the next one runs. learned_positions: rows of the table of learned positions, 0 for none. adapters: None where
    all weights are trained. ranks: GPUs over which weights, gradients and the optimizer's states are spread
    (fa_train.parallel.fsdp), 1 where each has them whole.
    """

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    activation: Activation
    tied: bool
    norm: Norm
    qk_norm: bool
    bias: bool
    rope: bool
    learned_positions: int
    precision: Precision
    tokens: int
    checkpointing: Checkpointing
    offload: Offloaded
    mlp_chunk: int | None
    loss_chunk: int
    optimizer: OptimizerKind
    accumulates: bool
    compiled: bool
    adapters: Adapters | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        require_checkpointing(self.checkpointing)
        require_offload(self.offload, self.checkpointing)
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise ValueError(f"trainer.precision must be one of {known}; got {self.precision}")

    @property
    def weight_bytes(self) -> int:
        """Of one element of a parameter, its gradient and the hidden states between blocks."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def gradient_bytes(self) -> int:
        """Of one element of a trained parameter and of its gradient."""
        return self.weight_bytes if self.adapters is None else 4

    @property
    def compute_bytes(self) -> int:
        """Of one element of a matrix product's operands."""
        return 4 if self.precision == "32-true" else 2

    @property
    def eager(self) -> bool:
        return not self.compiled

    @property
    def mixed(self) -> bool:
        return self.weight_bytes != self.compute_bytes

    @property
    def everything(self) -> bool:
        """Whether all that blocks keep leaves."""
        return self.offload == "all"

    @property
    def query_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def norm_statistics(self) -> int:
        """fp32 numbers a row that a norm keeps."""
        return 1 if self.norm == "rmsnorm" else 2

    @property
    def up_dim(self) -> int:
        return 2 * self.ffn_dim if self.gated else self.ffn_dim

    @property
    def gated(self) -> bool:
        return self.activation != "gelu"
