"""Tests the Hopper backward kernels on a GPU."""

import pytest
import torch

from fa_kernels import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.gpu


def run(q, k, v, do, **options):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flash_attn_func(*(x[None] for x in inputs), **options)[0]
    return [o, *torch.autograd.grad(o, inputs, do)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_nan_stays_in_its_head(head_dim, softcap, causal, deterministic):
    """If a stream has only one document, the kernels neither record which rows contain NaN nor repair tiles.

    The last block of queries reaches past the end of its head, and must not read the next head.

    With at most 256 keys, only two key tiles add to each element of dQ, so the order of the additions does not matter.
    """
    total, n_heads = 197, 3
    q, k, v, do = (torch.randn(total, n_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    with_nan = q.clone()
    with_nan[:, 1, 0] = torch.nan
    options = {"softcap": softcap, "causal": causal, "deterministic": deterministic}
    results = run(with_nan, k, v, do, **options)
    for ours, exact in zip(results, run(q, k, v, do, **options), strict=True):
        assert torch.equal(ours[:, ::2], exact[:, ::2])
        assert ours[:, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dk_and_dv_have_one_owner(head_dim, dtype):
    """Each element of dK and dV is computed by one program, so its bits are equal in every run."""
    q, do = (torch.randn(3000, 8, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(3000, 2, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    _, _, *first = run(q, k, v, do, causal=True)
    for _ in range(9):
        _, _, *again = run(q, k, v, do, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(
    "lengths", [([3000], [3000]), ([700, 1, 0, 900, 64], [900, 1, 500, 900, 300])], ids=["one", "several"]
)
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (200, 70)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dq_summed_in_one_order_is_the_same_in_every_run(head_dim, dtype, softcap, window, lengths):
    """Deterministic and non-deterministic gradients differ only by fp32 rounding.

    Tensor cores add 16 products at a time to an fp32 sum, and truncate the result. The absolute tolerance is the number
    of truncated results, times the eps of fp32, times the largest gradient.
    """
    cu_q, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in lengths)
    q, k, v = (
        torch.randn(sum(x), heads, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for x, heads in zip((lengths[0], lengths[1], lengths[1]), (8, 2, 2), strict=True)
    )
    do = torch.randn_like(q)

    def gradients(deterministic):
        o = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3000, 3000, window_size=window, softcap=softcap, deterministic=deterministic
        )
        return torch.autograd.grad(o, [q, k, v], do)

    first = gradients(deterministic=True)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(gradients(deterministic=True), first, strict=True))
    additions = max(sum(lengths[0]) * 8 // 2, sum(lengths[1])) / 16
    for one_order, any_order in zip(first, gradients(deterministic=False), strict=True):
        cut_off = additions * torch.finfo(torch.float32).eps * any_order.abs().max().item()
        torch.testing.assert_close(one_order, any_order, rtol=torch.finfo(dtype).eps, atol=cut_off)
