"""Computes the minimum memory of naive attention, without running it.

A score is the product of one query and one key in one head. The softmax is computed in fp32, so the scores alone take
`4 * N**2` bytes per head for N tokens. The table shows the bytes per score that
fa_train.models.attention.naive_attention needs, if an element of q has 2 or 4 bytes:

| when | 2 | 4 | tensors |
|:--|--:|--:|:--|
| kept from forward to backward | 6 | 4 | the softmax's output in fp32, and its copy for P V |
| peak in the backward | 12 | 12 | the softmax's output, its gradient, the scores' gradient |

The mask takes one byte per pair of a query and a key, and all heads share it. The backward of compiled code recomputes
the mask and the softmax, but no matrix product. Compiled code keeps at least one tensor of scores in the dtype of q,
and the backward also needs the gradient of this tensor. The memory of a training step peaks at the start of the
backward, in the last layer. With activation checkpointing, the score tensors of only one layer exist at a time.
`selective` checkpointing keeps the output of flash attention, but no tensor of naive attention. Training with AdamW in
fp32 takes 16 bytes per parameter: weight, gradient and two moments. The formula leaves out the memory of hidden states,
logits and libraries. In eager mode, the forward of naive attention reads and writes `4 * N**2 + 4 * N * d` elements per
head. An ideal forward would read and write only the `4 * N * d` elements of q, k, v and o.
"""

import math
from dataclasses import dataclass

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_train.callbacks.monitor import GIB
from fa_train.models.gpt import GPT

SCORE = 4  # bytes in fp32
MASK = 1
KEPT = {2: 6, 4: 4}  # maps the bytes per element of q to the bytes per score
BACKWARD = 12
OPERANDS = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}  # maps a precision to the dtype of q
# bytes per parameter on the GPU: weight + gradient + optimizer state; adamw_bf16 and adamw_master train bf16 weights
PARAMETER_BYTES = {"adamw": 4 + 4 + 8, "adamw_8bit": 4 + 4 + 2, "adamw_bf16": 2 + 2 + 4, "adamw_master": 2 + 2 + 10}
LEAST_PARAMETER_BYTES = 4  # bytes per parameter for any other optimizer: the formula counts only the weight


@dataclass(frozen=True)
class Formula:
    """Naive attention needs at least `fixed + per_pair * N**2` bytes of memory for N tokens."""

    n_heads: int
    head_dim: int
    fixed: int
    per_pair: int

    def peak(self, seq_len: int) -> int:
        return self.fixed + self.per_pair * seq_len**2

    def fails_at(self, capacity: int) -> int:
        """Returns the length in tokens of the shortest sequence that does not fit into `capacity` bytes."""
        return math.isqrt((capacity - self.fixed) // self.per_pair) + 1 if capacity > self.fixed else 1

    def scores(self, seq_len: int) -> int:
        """Returns the bytes of one layer's attention scores."""
        return SCORE * self.n_heads * seq_len**2

    def explain(self, what: str, capacity: int) -> str:
        return (
            f"Naive attention, {what}: the scores of a layer take 4 N^2 bytes per head, {SCORE * self.n_heads} N^2 in "
            f"all. At least {self.fixed / GIB:.3g} GiB + {self.per_pair} N^2 bytes exist at once, so it must fail from "
            f"N = {self.fails_at(capacity)} tokens on this device of {capacity / GIB:.1f} GiB. In eager mode, it "
            f"moves N/d + 1 times as many bytes as necessary, with d = {self.head_dim}."
        )


def sized_model(cfg: DictConfig) -> DictConfig:
    """Returns the config of a run's model, with the size of the vocabulary."""
    model = cfg.model.copy()
    model.vocab_size = model.vocab_size or cfg.data.vocab_size
    return model


def step_formula(cfg: DictConfig) -> Formula:
    """Computes the formula for a training step of a run with this config."""
    with torch.device("meta"):
        model: GPT = instantiate(sized_model(cfg))
    sizes = model.config
    operand = OPERANDS[cfg.trainer.precision].itemsize
    # memory=auto may choose checkpointing
    keeps_scores = cfg.memory.checkpointing == "none" and not cfg.memory.get("auto")
    others = sizes.n_layers - 1 if keeps_scores else 0
    if cfg.lit_gpt.compile_model:
        per_pair = (others + 2) * operand * sizes.n_heads
    else:
        per_pair = others * (KEPT[operand] * sizes.n_heads + MASK) + BACKWARD * sizes.n_heads + MASK
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = PARAMETER_BYTES.get(cfg.choices.optimizer, LEAST_PARAMETER_BYTES) * parameters
    return Formula(sizes.n_heads, sizes.heads.dim, state, per_pair)
