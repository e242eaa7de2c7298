"""Computes the minimum memory of naive attention, without running it.

A score is the product of one query and one key in one head. The softmax is computed in fp32, so the scores alone take
`4 * N**2` bytes per head for N tokens. The table shows the bytes per score that
fa_train.models.attention.naive_attention needs, if an element of q has 2 or 4 bytes:

| when | 2 | 4 | tensors |
|:--|--:|--:|:--|
| kept from forward to backward | 6 | 4 | the softmax's output in fp32, and its copy for P V |
| peak in the forward | 10 | 8 | masked scores, their copy in fp32, the softmax's output |
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

from dataclasses import dataclass
from typing import Literal

import torch
from hydra.utils import instantiate

from fa_train.callbacks.monitor import GIB
from fa_train.models.gpt import GPT
from scripts.ablation.cases import AttentionCase, StepCase, configuration, options_of

SCORE = 4  # bytes in fp32
MASK = 1
KEPT = {2: 6, 4: 4}  # maps the bytes per element of q to the bytes per score
FORWARD = {2: 10, 4: 8}
BACKWARD = 12
# bytes per parameter on the GPU: weight + gradient + optimizer state; adamw_bf16 and adamw_master train bf16 weights
PARAMETER_BYTES = {"adamw": 4 + 4 + 8, "adamw_8bit": 4 + 4 + 2, "adamw_bf16": 2 + 2 + 4, "adamw_master": 2 + 2 + 10}
LEAST_PARAMETER_BYTES = 4  # bytes per parameter for any other optimizer: the formula counts only the weight


@dataclass(frozen=True)
class Formula:
    """Naive attention needs at least `fixed + per_token * N + per_pair * N**2` bytes of memory for N tokens."""

    n_heads: int
    head_dim: int
    fixed: int
    per_token: int
    per_pair: int

    def peak(self, seq_len: int) -> int:
        return self.fixed + self.per_token * seq_len + self.per_pair * seq_len**2

    def fails_at(self, capacity: int) -> int:
        """Returns the length in tokens of the shortest sequence that does not fit into `capacity` bytes."""
        fits, fails = 0, 1
        while self.peak(fails) <= capacity:
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self.peak(middle) <= capacity else (fits, middle)
        return fails

    def scores(self, seq_len: int) -> int:
        """Returns the bytes of one layer's attention scores."""
        return SCORE * self.n_heads * seq_len**2

    def traffic_ratio(self, seq_len: int) -> float:
        """Returns N / d, the size of a head's scores (N x N) relative to the size of its queries (N x d)."""
        return seq_len / self.head_dim

    def explain(self, what: str, capacity: int) -> str:
        terms = [f"{self.fixed / GIB:.3g} GiB"] if self.fixed else []
        terms += [f"{self.per_token} N"] if self.per_token else []
        return (
            f"Naive attention, {what}: the scores of a layer take 4 N^2 bytes per head, {SCORE * self.n_heads} N^2 in "
            f"all. At least {' + '.join([*terms, f'{self.per_pair} N^2 bytes'])} exist at once, so it must fail from "
            f"N = {self.fails_at(capacity)} tokens on this device of {capacity / GIB:.1f} GiB. In eager mode it moves "
            f"N/d + 1 times more bytes than necessary, with d = {self.head_dim}."
        )


def step_formula(case: StepCase) -> Formula:
    """Computes the formula for a training step from the sizes of the model."""
    config = configuration(case)
    with torch.device("meta"):
        model: GPT = instantiate(config.model)
    sizes = model.config
    operand = case.operand_dtype.itemsize
    others = sizes.n_layers - 1 if config.memory.checkpointing == "none" else 0
    if case.compiled:
        per_pair = (others + 2) * operand * sizes.n_heads
    else:
        per_pair = others * (KEPT[operand] * sizes.n_heads + MASK) + BACKWARD * sizes.n_heads + MASK
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = PARAMETER_BYTES.get(options_of(case)["optimizer"], LEAST_PARAMETER_BYTES) * parameters
    return Formula(sizes.n_heads, sizes.heads.dim, state, 0, per_pair)


def attention_formula(case: AttentionCase, passes: Literal["forward", "both"]) -> Formula:
    """Computes the formula for attention alone. The formula always includes q, k, v and the gradient of o."""
    operand = case.operand_dtype.itemsize
    per_score = BACKWARD if passes == "both" else FORWARD[operand]
    inputs = 4 * case.n_heads * case.head_dim * operand
    return Formula(case.n_heads, case.head_dim, 0, inputs, per_score * case.n_heads + MASK)
