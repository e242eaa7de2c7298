"""The feed-forward network (FFN) of a decoder block.

All FFN classes compute the same function, but save different tensors for the backward pass.

| class | chosen if | saved for the backward, besides the input x and the weights |
|:--|:--|:--|
| RecomputedFFN | by default | up(x) |
| DenseFFN | mlp_chunk is not set, and a layer has an adapter, 4-bit weights or float8 | up(x) and the activations |
| TiledFFN | mlp_chunk is set | nothing, or up(x) with memory.offload=all and two plain layers |
"""

import torch
from torch import Tensor, nn

from fa_train.memory.memory import Memory
from fa_train.memory.recompute import recomputed
from fa_train.memory.swiglu_down import swiglu_down, trains_plainly
from fa_train.memory.tiled_ffn import LinearTensors, activate, tiled_mlp
from fa_train.models.config import Activation, ModelConfig


class FFN(nn.Module):
    """A feed-forward network, down(activation(up(x))). If the activation has a gate, `up` computes gates and values."""

    def __init__(self, up: nn.Linear, down: nn.Linear, activation: Activation) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation: Activation = activation

    def at_once(self, x: Tensor) -> Tensor:
        """Computes the FFN of all tokens at once. Shapes: (total, dim) -> (total, dim)."""
        return self.down_of(self.up(x))

    def down_of(self, projected: Tensor) -> Tensor:
        """Applies the activation, and then the linear layer `down`. Shapes: (total, up_dim) -> (total, dim).

        Compiled SwiGLU has a fused backward pass, except if `down` is sharded, is frozen or has an adapter. In eager
        mode, SwiGLU uses torch's operators, because the memory planner assumes torch's operators.
        """
        if self.activation == "swiglu" and torch.compiler.is_compiling() and trains_plainly(self.down):
            return swiglu_down(projected, self.down.weight, self.down.bias)
        return self.down(activate(projected, self.activation))


class DenseFFN(FFN):
    """Saves up(x) and the activations for the backward pass.

    The gradient of an adapter on `down` needs the activations.
    With float8, torch.compile decides whether to save or to recompute the activations.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (total, dim) -> (total, dim)."""
        return self.at_once(x)


class RecomputedFFN(FFN):
    """Saves only up(x). The backward pass recomputes the activations.

    checkpointed: whether activation checkpointing recomputes the whole block.
    """

    def __init__(self, up: nn.Linear, down: nn.Linear, activation: Activation, checkpointed: bool) -> None:
        super().__init__(up, down, activation)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (total, dim) -> (total, dim)."""
        # `recomputed` is not nested in a compiled activation checkpoint, because torch 2.11 would then save up(x).
        if self.checkpointed and torch.compiler.is_compiling():
            return self.at_once(x)
        return recomputed(self.down_of, self.up(x))


class TiledFFN(FFN):
    """Computes the FFN of chunk_size tokens at a time with fa_train.memory.tiled_ffn. keep: whether to save up(x).

    The `forward` methods and hooks of the two linear layers do not run.
    """

    def __init__(self, up: nn.Linear, down: nn.Linear, activation: Activation, chunk_size: int, keep: bool) -> None:
        super().__init__(up, down, activation)
        self.chunk_size, self.keep = chunk_size, keep

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (total, dim) -> (total, dim)."""
        up, down = tensors_of(self.up), tensors_of(self.down)
        return tiled_mlp(x, up, down, self.activation, self.chunk_size, self.keep)


def build_ffn(config: ModelConfig, memory: Memory) -> FFN:
    """Builds the FFN of one block with new weights."""
    up = nn.Linear(config.dim, config.up_dim, bias=config.ffn_bias)
    down = nn.Linear(config.ffn_dim, config.dim, bias=config.ffn_bias)
    return choose_ffn(up, down, config.activation, memory)


def choose_ffn(up: nn.Linear, down: nn.Linear, activation: Activation, memory: Memory) -> FFN:
    """Builds an FFN from two linear layers, which may have adapters or 4-bit weights, or compute in float8.

    This file's docstring lists the FFN classes.
    Raises: ValueError if memory.mlp_chunk is set and a layer is neither nn.Linear nor LoRALinear.
    """
    plain = type(up) is nn.Linear and type(down) is nn.Linear
    if memory.mlp_chunk is None:
        if plain:
            return RecomputedFFN(up, down, activation, checkpointed=memory.checkpointing != "none")
        return DenseFFN(up, down, activation)
    for linear in (up, down):
        if type(linear) is not nn.Linear and not hasattr(linear, "tensors"):
            name = type(linear).__name__
            raise ValueError(f"memory.mlp_chunk needs layers of class nn.Linear or LoRALinear in the FFN; got {name}")
    return TiledFFN(up, down, activation, memory.mlp_chunk, keep=plain and memory.offload == "all")


def tensors_of(linear: nn.Linear) -> LinearTensors:
    """Returns the tensors of a layer. The layer is an nn.Linear, or has a method `tensors` like LoRALinear."""
    if type(linear) is nn.Linear:
        return LinearTensors(linear.weight, linear.bias)
    tensors: LinearTensors = linear.tensors()  # type: ignore[operator]
    return tensors
