"""The Hopper forward's softmax on a GPU, where the largest score of a row comes late, by little and by much larger."""

import math
from typing import get_args

import pytest
import torch

from kernels.flash_attention.features import Features
from kernels.flash_attention.hopper import fwd
from kernels.flash_attention.reference import attention_reference
from kernels.flash_attention.schedule import DocumentLength, dense_schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
    ),
]

# of the exponents of two, from each 64 keys to the 64 before them, which are visited later
RISES = [-300.0, -15.0, 0.5, 7.5, 8.5, 14.5, 15.5, 40.0, 300.0]
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # relative, to nearest


@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("head_dim", fwd.FORWARD_TILES)
def test_a_maximum_that_rises_late(head_dim, dtype, rise):
    """In every seventh row, so that warps have rows that rise and rows that do not; o in fp32 where there is room."""
    total, n_heads = 700, 2
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(total, n_heads, head_dim, device="cuda", generator=generator) for _ in range(3))
    q[:, :, 0] = 0.0
    q[::7, :, 0] = 1.0
    k[:, :, 0] = rise * torch.arange(total, device="cuda").flip(0).div(64, rounding_mode="floor").unsqueeze(1)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    features = Features(math.log(2.0), 0.0, None, ())  # scores are exponents of two
    cu_seqlens = torch.tensor([0, total], dtype=torch.int32, device="cuda")
    exact, exact_lse = attention_reference(
        q, k, v, cu_seqlens, cu_seqlens, causal=False, softmax_scale=features.softmax_scale
    )
    schedule = dense_schedule(1, total, total, q.device, causal=False)
    for tiles in {fwd.forward_tiles(head_dim, documents) for documents in get_args(DocumentLength)}:
        o, lse = fwd.run_forward(q, k, v, schedule, features, dtype if tiles.o_in_q else torch.float32, tiles)
        # of probabilities, and of o; and products are added up in fp32
        assert (o - exact).abs().max() <= 2.1 * ROUNDING[dtype] * v.abs().max(), tiles
        # tensor cores add 16 products at a time, and cut off what fp32 does not hold of the sum
        largest = (q.double().norm(dim=2).amax() * k.double().norm(dim=2).amax()) * features.softmax_scale
        assert (lse - exact_lse).abs().max() <= (head_dim / 16 + 2) * 2.0**-23 * largest, tiles
