"""The calls that the Hopper kernels support."""

import torch
from torch import Tensor

from fa_kernels.device import interpreted, is_hopper
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS
from fa_kernels.launch.descriptors import loadable

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = tuple(FORWARD_CONFIGS)  # the backward kernels support the same head dimensions


def supports(q: Tensor, k: Tensor, v: Tensor, features: Features, out_dtype: torch.dtype) -> bool:
    """Returns whether the kernels can run here, can read q, k and v in place by TMA, and can write o in out_dtype.

    A backward pass writes no o, so its caller passes q's dtype as out_dtype.
    Shapes: q (total_q, n_heads, head_dim); k and v (total_k, n_kv_heads, head_dim).
    """
    return (
        q.is_cuda
        and not interpreted()
        and is_hopper(q.device)
        and q.dtype in DTYPES
        and q.shape[2] == k.shape[2] == v.shape[2]
        and q.shape[2] in HEAD_DIMS
        and (out_dtype == q.dtype or (out_dtype == torch.float32 and not FORWARD_CONFIGS[q.shape[2]].o_in_q))
        and not features.alibi
        and loadable(q)
        and loadable(k)
        and loadable(v)
    )
