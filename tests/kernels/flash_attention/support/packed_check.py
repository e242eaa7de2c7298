"""Random packed inputs, and a check of flash_attn_varlen_func against dense attention in fp64."""

from functools import partial

import torch
from torch import Tensor

from fa_kernels import flash_attn_varlen_func
from fa_kernels.flash_attention.reference import attention_reference
from tests.kernels.support.attention_check import DEVICE
from tests.support.tolerance import assert_as_accurate


def draw(total_q, total_k, n_heads, n_kv_heads, head_dim, v_head_dim=None, dtype=torch.float32, seed=0) -> list[Tensor]:
    """Returns random q, k, v and gradients of o and lse."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [
        (total_q, n_heads, head_dim),
        (total_k, n_kv_heads, head_dim),
        (total_k, n_kv_heads, v_head_dim or head_dim),
        (total_q, n_heads, v_head_dim or head_dim),
    ]
    tensors = [torch.randn(s, generator=generator, device=DEVICE).to(dtype).requires_grad_() for s in shapes]
    dlse = torch.randn(n_heads, total_q, generator=generator, device=DEVICE)
    return [*tensors, dlse]


def check(q, k, v, do, dlse, cu_q, cu_k, sinks=None, **features):
    """Checks that outputs and gradients of flash_attn_varlen_func are as accurate as dense attention in the same
    dtype.
    """
    results = {}
    for name, function in {
        "ours": partial(flash_attn_varlen_func, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0], return_lse=True),
        "exact": attention_reference,
        "same dtype": partial(attention_reference, dtype=q.dtype),
    }.items():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        if sinks is None:
            o, lse = function(*inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **features)
        else:
            inputs.append(sinks.detach().requires_grad_())
            o, lse = function(*inputs[:3], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=inputs[3], **features)
        # if a row sees no key, its lse is -inf, and this lse gets no gradient
        seen = torch.isfinite(lse)
        grads = torch.autograd.grad((o, lse), inputs, (do.to(o.dtype), torch.where(seen, dlse, 0.0).to(lse.dtype)))
        assert all(torch.isfinite(g).all() for g in grads), name
        results[name] = [o, torch.where(seen, lse, -1e4), *grads]
    # do · v and delta are sums of head_dim fp32 products. If positive and negative products cancel, the sum is mostly
    # rounding error.
    floor = torch.finfo(torch.float32).eps * v.shape[-1] * max(x.detach().abs().max().item() for x in (q, k, v, do))
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")[: len(results["ours"])]
    for name, ours, exact, baseline in zip(names, *results.values(), strict=True):
        assert_as_accurate(name, ours, exact, baseline, floor=floor)
