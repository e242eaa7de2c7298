"""Helpers for the tests of the Hopper kernels: the required GPU, the forward tile sizes, and calls with many work
items.
"""

from typing import get_args

import pytest
import torch

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import choose as bwd
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.forward.config import ForwardConfig, forward_config
from fa_kernels.flash_attention.schedule import LengthClass, build_schedule, causal_schedule

NEEDS_SM_90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
    ),
]


def tiles_of(head_dim: int) -> set[ForwardConfig]:
    """Returns the forward tile sizes for `head_dim` in all length classes and output dtypes."""
    return {
        forward_config(head_dim, length_class, wide_o)
        for length_class in get_args(LengthClass)
        for wide_o in (False, True)
    }


def problem(lengths, head_dim):
    """Returns the arguments of attention_forward for 8 heads in bf16."""
    total = sum(lengths)
    q, k, v = (torch.randn(total, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    features = Features(head_dim**-0.5, softcap=0.0, sinks=None, alibi=[])
    return q, k, v, causal_schedule(cu_seqlens, total, q.device), features, torch.bfloat16


def backward_problem(lengths_q, lengths_k, head_dim, dtype=torch.bfloat16, softcap=0.0, deterministic=False):
    """Returns the arguments of `gradients` for 16 query heads and 8 KV heads, so that each program has several work
    items.
    """
    q, do, k, v = (
        torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=dtype)
        for lengths, heads in ((lengths_q, 16), (lengths_q, 16), (lengths_k, 8), (lengths_k, 8))
    )
    cu_seqlens = (torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    schedule = build_schedule(*cu_seqlens, q.shape[0], k.shape[0], causal=True)
    features = Features(head_dim**-0.5, softcap, sinks=None, alibi=[])
    o, lse = fwd.attention_forward(q, k, v, schedule, features, dtype)
    return do, None, q, k, v, o, lse, schedule, features, deterministic


def gradients(*arguments):
    return bwd.attention_backward(*arguments)[:3]
