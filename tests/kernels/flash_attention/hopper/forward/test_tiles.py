"""Tests each tile size of the Hopper forward kernel with each mask and feature.

The tests pass the tile sizes directly to the kernel. In normal calls, some tile sizes occur only with long documents,
whose dense reference would take too much memory. q, k and v are slices of tensors with wider heads.
"""

import itertools

import pytest
import torch

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import build_schedule
from tests.kernels.flash_attention.hopper.support.hopper import NEEDS_SM_90, tiles_of
from tests.kernels.support.attention_check import MASKS, cumulative
from tests.support.tolerance import assert_as_accurate

pytestmark = NEEDS_SM_90

LENGTHS = [([700], [700]), ([500], [900]), ([150, 0, 3, 247, 300], [150, 7, 40, 200, 333])]  # of queries and keys


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", FORWARD_CONFIGS)
def test_every_tile_size_is_as_accurate_as_torch(head_dim, dtype, with_sinks, softcap, device):
    generator = torch.Generator(device).manual_seed(0)

    def heads(total, n_heads):
        return torch.randn(total, n_heads, 2 * head_dim, device=device, generator=generator).to(dtype)[..., :head_dim]

    sinks = torch.randn(4, device=device, generator=generator) if with_sinks else None
    features = Features(head_dim**-0.5, softcap, sinks, ())
    for (lengths_q, lengths_k), mask, n_kv_heads in itertools.product(LENGTHS, MASKS, (4, 1)):
        total_q, total_k = sum(lengths_q) + (5 if len(lengths_q) > 1 else 0), sum(lengths_k)  # rows of no document
        q, k, v = heads(total_q, 4), heads(total_k, n_kv_heads), heads(total_k, n_kv_heads)
        cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
        exact, baseline = (
            attention_reference(q, k, v, cu_q, cu_k, softcap=softcap, sinks=sinks, dtype=truth, **mask)
            for truth in (torch.float32, dtype)
        )
        schedule = build_schedule(cu_q, cu_k, total_q, total_k, padded=len(lengths_q) > 1, **mask)
        floor = torch.finfo(torch.float32).eps * head_dim * max(x.abs().max().item() for x in (q, k, v))
        for tiles in tiles_of(head_dim):
            ours = fwd.run_forward(q, k, v, schedule, features, dtype, tiles)
            for name, *results in zip(("o", "lse"), ours, exact, baseline, strict=True):
                case = f"{name} of {lengths_q}, {lengths_k}, {mask}, {n_kv_heads} KV heads, {tiles}"
                seen = [torch.where(x == float("-inf"), -1e4, x) for x in results]
                assert_as_accurate(case, *seen, floor=floor)
