"""How many floating-point operations a training step needs, and how many a GPU can do: the two sides of MFU."""

from typing import TypeVar

import torch
from torch import Tensor

from fa_train.models.config import ModelConfig

# bf16 and fp16 with fp32 sums, without sparsity, in FLOP/s, from the makers' data sheets; the first match counts
PEAKS = (
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("A40", 150e12),
    ("A10G", 70e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)

Number = TypeVar("Number", float, Tensor)


def train_flops(model: ModelConfig, total_tokens: int, sum_sq_doc_len: Number) -> Number:
    """Model FLOPs of forward and backward over total_tokens; a recomputed forward does not count.

    6 * N * T + 6 * n_layers * n_heads * head_dim * S, where T is total_tokens, N the weights that multiply each token
    (all matrices and the head, tied or not; no embeddings, norms or biases) and S the sum of squared document lengths.
    The first term: a multiply and an add a weight forward, twice that backward. The second: Q K^T and P V take
    2 * 2 * head_dim FLOPs a head and visible pair, causality leaves S / 2 pairs, and the backward again doubles it.
    Frozen weights count as the others do, though LoRA computes no gradient of theirs: its MFU is flattered by a third.
    sum_sq_doc_len may be a tensor, so that the GPU need not be waited for; then so is the result.
    """
    matrices = model.n_layers * sum(model.block_matrices) + model.dim * model.vocab_size
    attention = 6 * model.n_layers * model.query_dim
    return 6.0 * matrices * total_tokens + attention * sum_sq_doc_len


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of the GPU that torch.cuda.get_device_name names; None when unknown.

    Only bf16 and fp16 are known: fp32's peak depends on whether the user allowed tf32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in PEAKS if name in device_name), None)
