"""The FLOPs of a training step and the peak FLOP/s of GPUs, from which MFU (model FLOPs utilisation) is computed."""

from typing import TypeVar

import torch
from torch import Tensor

from fa_train.models.config import ModelConfig

# dense bf16 and fp16 peaks with fp32 accumulation in FLOP/s, from vendors' data sheets; the first match is used
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
    """Returns the model FLOPs of the forward and backward pass. Recomputed activations do not count.

    The formula is 6 * N * T + 6 * n_layers * n_heads * head_dim * S. T is total_tokens. N is the number of weights in
    all matrices and the head, without embeddings, norms and biases. S is the sum of squared document lengths.
    In the first term, the forward needs 2 FLOPs per weight and token, and the backward needs twice as many. In the
    second term, Q K^T and P V need 4 * head_dim FLOPs per head and visible pair of a query and a key. Causal attention
    has S / 2 such pairs. The backward again needs twice as many FLOPs as the forward.
    Frozen weights count too, although LoRA computes no gradients for them. The MFU of LoRA is therefore overestimated.
    If sum_sq_doc_len is a tensor, the result is a tensor, and the host does not wait for the GPU.
    """
    matrices = model.n_layers * sum(model.block_matrices) + model.dim * model.vocab_size
    attention = 6 * model.n_layers * model.query_dim
    return 6.0 * matrices * total_tokens + attention * sum_sq_doc_len


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of a GPU, or None if it is unknown.

    device_name: the result of torch.cuda.get_device_name. The table has bf16 and fp16 only, because the peak of fp32
    depends on whether TF32 is enabled.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in PEAKS if name in device_name), None)
