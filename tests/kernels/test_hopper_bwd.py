"""The Hopper backward on a GPU: heads keep NaN to themselves, dK and dV are repeatable where dQ is a sum.

And where one pass and two multiply alike, they give the same dK and dV.
"""

import pytest
import torch

from kernels import flash_attn_func

pytestmark = pytest.mark.gpu


def run(q, k, v, do, **options):
    """o, dq, dk, dv of one document."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flash_attn_func(*(x[None] for x in inputs), **options)[0]
    return [o, *torch.autograd.grad(o, inputs, do)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_nan_stays_in_its_head(head_dim, softcap, causal, deterministic):
    """In one document nothing is repaired; the block of queries past a head's last one must not read the next head's.

    To 256 keys, two tiles add to each dQ, in either order the same bits.
    """
    total, n_heads = 197, 3
    q, k, v, do = (torch.randn(total, n_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    spoiled = q.clone()
    spoiled[:, 1, 0] = torch.nan
    options = {"softcap": softcap, "causal": causal, "deterministic": deterministic}
    results = run(spoiled, k, v, do, **options)
    for ours, exact in zip(results, run(q, k, v, do, **options), strict=True):
        assert torch.equal(ours[:, ::2], exact[:, ::2])
        assert ours[:, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dk_and_dv_have_one_owner(head_dim, dtype):
    """So they are the same bits in every run, also where dQ is summed in any order; a race would show here."""
    q, do = (torch.randn(3000, 8, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(3000, 2, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    _, _, *first = run(q, k, v, do, causal=True)
    for _ in range(9):
        _, _, *again = run(q, k, v, do, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "softcap"),
    [
        pytest.param(64, 30.0, id="64-capped"),
        pytest.param(96, 30.0, id="96-capped"),
        pytest.param(128, 0.0, id="128"),
        pytest.param(128, 30.0, id="128-capped"),
    ],
)
def test_dk_and_dv_of_two_passes_are_those_of_one(head_dim, softcap):
    """In bf16, where both round P, the cap's factor and dP - delta before they multiply them, or neither does."""
    q, do = (torch.randn(3000, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(3000, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, _, *one = run(q, k, v, do, causal=True, softcap=softcap)
    _, _, *two = run(q, k, v, do, causal=True, softcap=softcap, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
