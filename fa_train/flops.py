"""The FLOPs of a training step and the peak FLOP/s of GPUs, which determine the MFU (model FLOPs utilisation)."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fa_train.models.config import ModelConfig

# (words of the device name, peak in FLOP/s). A GPU has the peak of the first entry whose words are in its name.
# The peaks come from data sheets. The peaks are for products of dense bf16 or fp16 matrices with fp32 accumulation.
PEAKS = (
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("A40", 150e12),
    ("A10G", 70e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)
# MIG instances have a part of a GPU. The other words mark variants with other peaks, such as RTX 3090 Ti.
OTHER_PEAK = re.compile(r"\b(MIG|Ti|D|Laptop|Max-Q)\b")

Number = TypeVar("Number", float, Tensor)


def train_flops(model: ModelConfig, total_tokens: int, pairs: Number) -> Number:
    """Returns the model FLOPs of the forward and backward pass, without recomputed activations.

    The formula is 6 * N * T + 12 * n_heads * head_dim * P. T is total_tokens. P is `pairs`, the result of
    attention_pairs. N counts the weights of all matrices, including the head. Embeddings, norms and biases are not in
    N.
    The term with T is for the weights: the forward needs 2 FLOPs per weight and token. The term with P is for
    attention. For each pair of a query and a visible key, Q K^T and P V together need 4 * head_dim FLOPs per head. For
    both terms, the backward needs twice as many FLOPs as the forward. The formula overestimates the MFU of LoRA: it
    counts frozen weights like trained weights, although LoRA computes no gradients of frozen weights. If `pairs` is a
    tensor, the result is a tensor, and the host does not wait for the GPU.
    """
    matrices = model.n_layers * sum(model.block_matrices) + model.dim * model.vocab_size
    return 6.0 * matrices * total_tokens + 12 * model.query_dim * pairs


def attention_pairs(windows: Sequence[int | None], lengths: Tensor) -> Tensor:
    """Returns the number of pairs of a query and a visible key, summed over all layers and documents.

    A document of L tokens has about `L**2 / 2` pairs in a layer without a window. In a layer with a window of W < L
    tokens, about `(L - W)**2 / 2` of the `L**2 / 2` pairs are outside the window. The exact numbers of pairs are
    `L * (L + 1) / 2` in the document, and `(L - W) * (L - W + 1) / 2` outside the window. The host does not wait for
    the GPU.
    windows: the window of each layer in tokens, or None, as in ModelConfig.windows.
    Shapes: lengths (n_docs,) -> () fp64.
    """
    lengths = lengths.double()
    squares = len(windows) * lengths.square().sum()
    for window, layers in Counter(windows).items():
        if window is not None:
            squares = squares - layers * (lengths - window).clamp(min=0).square().sum()
    return squares / 2


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of a GPU, or None if it is unknown.

    device_name: the result of torch.cuda.get_device_name.
    dtype: bf16 or fp16. The peak of fp32 is unknown, because it depends on whether TF32 is enabled.
    """
    if dtype not in (torch.bfloat16, torch.float16) or OTHER_PEAK.search(device_name):
        return None
    return next((peak for words, peak in PEAKS if re.search(rf"\b{words}\b", device_name)), None)
