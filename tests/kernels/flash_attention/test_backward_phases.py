"""A backward pass in three calls (backend.prepare_backward) equals backend.backward."""

import pytest
import torch

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.schedule import causal_schedule
from tests.kernels.support.attention_check import cumulative

LENGTHS, HEADS, KV_HEADS = [40, 0, 70, 25], 2, 1
TOTAL = sum(LENGTHS)
# (dtype, head_dim, soft cap): each kind of Hopper kernel, and a head_dim that only portable kernels support
KINDS = [
    pytest.param(torch.float16, 64, 0.0, id="fused"),
    pytest.param(torch.float16, 128, 30.0, id="two kernels"),
    pytest.param(torch.float16, 256, 0.0, id="wide"),
    pytest.param(torch.float16, 48, 0.0, id="portable"),
]


def problem(seed, dtype, head_dim, softcap, device, cu_seqlens, sinks):
    """Returns `do`, `q`, `k` and `v`, then the schedule and the features, then `o` and `lse`."""
    generator = torch.Generator(device).manual_seed(seed)
    do, q, k, v = (
        torch.randn(TOTAL, n, head_dim, generator=generator, device=device).to(dtype)
        for n in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    )
    if cu_seqlens is not None:  # NaN in the first document must not reach the others
        q[3, 0, 0] = v[5, 0, 2] = torch.nan
    logits = torch.linspace(-1, 1, HEADS, device=device) if sinks else None
    options = causal_schedule(cu_seqlens, TOTAL, q.device), Features(head_dim**-0.5, softcap, logits, [])
    return (do, q, k, v), options, backend.forward(q, k, v, *options, dtype)


@pytest.mark.parametrize("several", [pytest.param(True, id="documents"), pytest.param(False, id="one")])
@pytest.mark.parametrize(("dtype", "head_dim", "softcap"), KINDS)
def test_three_calls_equal_one(dtype, head_dim, softcap, several, device):
    """k and v contain NaN during the first call, which must not read them. On a GPU, later rounds of the loop replay
    recorded launches.
    """
    cu_seqlens = cumulative(LENGTHS).to(device) if several else None
    for seed in range(3 if device.type == "cuda" else 1):
        inputs, options, (o, lse) = problem(seed, dtype, head_dim, softcap, device, cu_seqlens, sinks=several)
        expected = backend.backward(inputs[0], None, *inputs[1:], o, lse, *options, True)
        do, q, *keys = inputs
        k, v = (torch.full_like(x, torch.nan) for x in keys)
        prepared = backend.prepare_backward(do, q, k, v, o, lse, *options, True)
        k.copy_(keys[0])
        v.copy_(keys[1])
        dk, dv = backend.gradients_of_keys(do, q, k, v, lse, prepared, *options, True)
        of_keys = dk.clone(), dv.clone()  # the third call must not change dk and dv
        (dq,) = backend.gradient_of_queries(do, q, k, v, lse, prepared, *options, True)
        for ours, exact in zip([dq, *of_keys, *prepared[-1:]], expected, strict=False):
            torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)
        assert expected[0].isnan().any() == several and expected[0][LENGTHS[0] :].isfinite().all()
        assert len(expected) == 3 + several, "the last prepared tensor is delta if there are sinks"
