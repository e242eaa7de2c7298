"""Tests properties of attention other than accuracy, on a GPU."""

import itertools
import os

import pytest
import torch

from fa_kernels import flash_attn_func, flash_attn_varlen_func
from fa_kernels.device import is_hopper
from fa_kernels.flash_attention.hopper.backward import choose as bwd
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_kernels.launch import record
from tests.kernels.support.attention_check import cumulative

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["portable", "auto"], autouse=True)
def _backend(request, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_BACKEND", request.param)


def inputs_of(*shape, n_kv_heads=2, dtype=torch.bfloat16):
    total, n_heads, head_dim = shape
    return [
        torch.randn(total, heads, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_deterministic_gradients_are_bitwise_equal_in_twenty_runs(head_dim, dtype, monkeypatch):
    inputs = inputs_of(4096, 8, head_dim, dtype=dtype)
    cu = cumulative([1000, 3, 0, 2500, 593])
    do = torch.randn_like(inputs[0])
    launches = []
    record.forget()
    backward = bwd.attention_backward
    monkeypatch.setattr(bwd, "attention_backward", lambda *x: launches.append(x) or backward(*x))

    def run():
        o = flash_attn_varlen_func(*inputs, cu, cu, 2500, 2500, causal=True, deterministic=True)
        return [o, *torch.autograd.grad(o, inputs, do)]

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    on_hopper = os.environ["FLASH_ATTENTION_BACKEND"] == "auto" and is_hopper(do.device)
    # `launches` can have fewer than 20 items, because replayed calls skip attention_backward
    assert bool(launches) == on_hopper


def test_neither_pass_waits_for_the_gpu():
    inputs = inputs_of(2048, 4, 64)
    cu = cumulative([1000, 1048])
    sinks = torch.zeros(4, device="cuda", requires_grad=True)

    def run():
        o, lse = flash_attn_varlen_func(*inputs, cu, cu, 1048, 1048, causal=True, sinks=sinks, return_lse=True)
        (o.float().sum() + lse.sum()).backward()
        dense = [x.detach().unflatten(0, (2, -1)) for x in inputs]
        flash_attn_func(*dense, causal=True)

    run()  # the first run compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_twenty_packings_compile_once():
    def attend(q, k, v, cu):
        return flash_attn_packed(q, k, v, causal_schedule(cu, q.shape[0], q.device)).square().mean()

    inputs = inputs_of(1024, 4, 64)
    compiled = torch.compile(attend, fullgraph=True)
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            cuts = torch.randint(0, 1025, (6,), generator=generator).sort().values
            cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([1024])]).to("cuda", torch.int32)
            compiled(*inputs, cu).backward()
    torch.testing.assert_close(compiled(*inputs, cu), attend(*inputs, cu))


@pytest.mark.timeout(600)
def test_tensors_may_have_more_than_two_to_the_31_elements():
    """The first and last documents must equal a reference that is computed on their slices."""
    total, n_heads, head_dim = 2**19 + 256, 32, 128
    assert total * n_heads * head_dim > 2**31
    lengths = [300, 2**18, 2**18 - 400, 356]
    cu = cumulative(lengths)
    q, k, v = (torch.randn(total, n_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    window = (128, 0)
    o = flash_attn_varlen_func(q, k, v, cu, cu, 2**18, 2**18, causal=True, window_size=window)
    do = torch.ones_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    for first, length in ((0, 300), (total - 356, 356)):
        rows = slice(first, first + length)
        parts = [x.detach()[rows].requires_grad_() for x in (q, k, v)]
        one = cumulative([length])
        exact, _ = attention_reference(*parts, one, one, causal=True, window_size=window, dtype=torch.float32)
        torch.testing.assert_close(o[rows].float(), exact, rtol=2e-2, atol=2e-2)
        for ours, truth in zip(gradients, torch.autograd.grad(exact, parts, do[rows].float()), strict=True):
            torch.testing.assert_close(ours[rows].float(), truth.float(), rtol=3e-2, atol=3e-2)


ADVERSARIAL = {
    "scores of 1e4": lambda q, k, v: (100 * q, 12 * k, v),
    "scores of -1e4": lambda q, k, v: (100 * q.abs(), -12 * k.abs(), v),
    "all equal": lambda q, k, v: (torch.ones_like(q), torch.ones_like(k), v),
    "one huge key": lambda q, k, v: (q, torch.cat([k[:50], 300 * k[50:51], k[51:]]), v),
    "denormals": lambda q, k, v: (q, k, v * torch.finfo(torch.bfloat16).tiny / 4),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_adversarial_scores_give_finite_and_accurate_results(name, head_dim):
    q, k, v = (x.detach() for x in inputs_of(500, 4, head_dim, n_kv_heads=4))
    tensors = [x.requires_grad_() for x in ADVERSARIAL[name](q, k, v)]
    cu = cumulative([300, 200])
    do = torch.randn_like(tensors[0])
    o = flash_attn_varlen_func(*tensors, cu, cu, 300, 300, causal=True)
    ours = [o, *torch.autograd.grad(o, tensors, do)]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        o, _ = attention_reference(*tensors, cu, cu, causal=True, dtype=dtype)
        results.append([o, *torch.autograd.grad(o, tensors, do.to(dtype))])
    for ours_, exact, baseline in zip(ours, *results, strict=True):
        assert torch.isfinite(ours_).all()
        # Scores of 1e4 have an error of 1e-3 in fp32, so probabilities have a relative error of 1e-3.
        error, torchs = ((x.double() - exact.double()).abs().max() for x in (ours_, baseline))
        assert error <= 2 * torchs + 4e-3 * exact.abs().max() + 1e-30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_nan_and_infinity_stay_in_their_document(head_dim, dtype, softcap, deterministic, causal):
    """The changed element shares its tile, and its block of 64 rows, with neighbouring documents."""
    lengths, first, last = [150, 20, 30, 90, 13, 260, 200], 200, 290
    cu = cumulative(lengths)
    total, nan_row = sum(lengths), 270
    clean = [x.detach() for x in inputs_of(total, 4, head_dim, dtype=dtype)]
    clean.append(torch.randn_like(clean[0]))
    others = torch.ones(total, dtype=torch.bool, device="cuda")
    others[first:last] = False

    def run(q, k, v, do):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = flash_attn_varlen_func(
            *inputs, cu, cu, 260, 260, causal=causal, softcap=softcap, return_lse=True, deterministic=deterministic
        )
        return [o, lse.T, *torch.autograd.grad(o, inputs, do)]

    truth = run(*clean)
    for index, value in itertools.product(range(4), (torch.nan, torch.inf)):
        tensors = [x.clone() for x in clean]
        tensors[index][nan_row, 0, 3] = value
        results = run(*tensors)
        for ours, exact in zip(results, truth, strict=True):
            # the repair kernels round differently from the other kernels
            atol = 4 * torch.finfo(dtype).eps * exact.abs().max().item()
            torch.testing.assert_close(ours[others], exact[others], rtol=0.0, atol=atol)
        o, lse, dq, _, _ = results
        if value == value:
            continue  # an input of inf can give a score of -inf, which gives a probability of 0 instead of NaN
        assert torch.isnan(dq[nan_row, 0]).any()
        if index < 2:
            assert torch.isnan(o[nan_row, 0]).all() and torch.isnan(lse[nan_row, 0])
        if index == 2:
            assert torch.isnan(o[nan_row:last, 0]).any(1).all()
