"""The conditions that the forward and the backward pass on Hopper share."""

import torch
from torch import Tensor

from fa_kernels.device import interpreted, is_hopper
from fa_kernels.flash_attention.features import Features
from fa_kernels.launch.descriptors import loadable

DTYPES = (torch.float16, torch.bfloat16)


def supports_inputs(q: Tensor, k: Tensor, v: Tensor, features: Features) -> bool:
    """Returns whether the kernels can run here, and can read q, k and v in place by TMA.

    The caller checks the head dimension.
    Shapes: q (total_q, n_heads, head_dim); k and v (total_k, n_kv_heads, head_dim).
    """
    return (
        q.is_cuda
        and not interpreted()
        and is_hopper(q.device)
        and q.dtype in DTYPES
        and q.shape[2] == k.shape[2] == v.shape[2]
        and not features.alibi
        and loadable(q)
        and loadable(k)
        and loadable(v)
    )
