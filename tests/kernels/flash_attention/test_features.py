"""Tests special values of attention's features: soft caps, sinks, ALiBi slopes and the scales of fp8."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fa_kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa_kernels.flash_attention.checks import FP8, MAX_SOFTCAP
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import causal_schedule
from tests.kernels.support.attention_check import cumulative


def dense(x, **options):
    return flash_attn_func(x, x, x, **options)


def varlen(x, **options):
    cu_seqlens = cumulative([8, 12])
    return flash_attn_varlen_func(x[0], x[0], x[0], cu_seqlens, cu_seqlens, 12, 12, **options)


def packed(x, **options):
    return flash_attn_packed(x[0], x[0], x[0], causal_schedule(None, x.shape[1], x.device), **options)


def cached(x, **options):
    return flash_attn_with_kvcache(x, x, x, **options)


@pytest.mark.parametrize("attend", [dense, varlen, packed, cached])
@pytest.mark.parametrize("softcap", [1000.1, 1e8, torch.inf, torch.nan])
def test_a_softcap_that_is_too_large_is_refused(attend, softcap, device):
    x = torch.randn(1, 20, 2, 16, device=device)
    with pytest.raises(ValueError, match=f"softcap must be finite and at most 1000, .* no soft cap; got {softcap}"):
        attend(x, softcap=softcap)


def test_a_cache_stays_as_it_was_if_the_softcap_is_refused(device):
    x, cache = torch.ones(1, 1, 2, 16, device=device), torch.zeros(1, 20, 2, 16, device=device)
    with pytest.raises(ValueError, match="softcap must be"):
        flash_attn_with_kvcache(x, cache, cache, x, x, cache_seqlens=3, softcap=2000.0)
    assert not cache.any()


@pytest.mark.parametrize("attend", [dense, cached])
def test_the_largest_softcap_is_accurate(attend, device):
    """A score s becomes s - s**3 / (3 * softcap**2), so scores below 5 change by less than 5e-5."""
    x = torch.randn(1, 64, 2, 16, device=device)
    torch.testing.assert_close(attend(x, softcap=MAX_SOFTCAP), attend(x), rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "varlen"])
def test_new_lengths_are_not_compiled_again(is_dense, device):
    def attend(x, cu_seqlens):
        if is_dense:
            return flash_attn_func(x, x, x, causal=True)
        return flash_attn_varlen_func(x[0], x[0], x[0], cu_seqlens, cu_seqlens, 64, 64, causal=True)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in (20, 30, 40, 50):
        x = torch.randn(1, length, 2, 16, device=device)
        cu_seqlens = cumulative([8, length - 8]).to(device)
        assert torch.equal(compiled(x, cu_seqlens), attend(x, cu_seqlens))
    assert counter.frame_count == 2  # torch.compile compiles once for the first length, and once for all other lengths


@pytest.mark.slow
@pytest.mark.parametrize("attend", [varlen, cached])
def test_a_symbolic_softcap_compiles(attend, device):
    """With dynamic=True, torch.compile treats each float as symbolic, including the default softcap."""
    x = torch.randn(1, 20, 2, 16, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), attend(x))
    for softcap in (3.0, 0.5, 0.0, -1.0):
        assert torch.equal(compiled(x, softcap=softcap), attend(x, softcap=softcap))


@pytest.mark.slow
def test_default_arguments_compile_with_dynamic_shapes(device):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, dynamic=True, fullgraph=True, backend="aot_eager")
    for seqlen in (20, 33):
        x = torch.randn(1, seqlen, 2, 16, device=device)
        assert torch.equal(compiled(x, x, x), dense(x))


def test_a_sink_of_minus_infinity_gets_no_gradient(device):
    """The last 10 queries see no key, so their lse is -inf in the head whose sink is -inf."""
    q, k, v = torch.randn(3, 20, 2, 16, device=device)
    cu_seqlens = cumulative([10])
    sinks = torch.tensor([-torch.inf, 0.5], device=device, requires_grad=True)
    o = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 10, 10, causal=True, sinks=sinks)
    exact, _ = attention_reference(q, k, v, cu_seqlens, cu_seqlens, causal=True, sinks=sinks)
    (ours,), (expected,) = (torch.autograd.grad(x.sum(), sinks) for x in (o, exact))
    assert ours[0] == 0.0
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("n_docs", [0, 2])
def test_empty_documents_may_have_slopes(n_docs, device):
    """Every row of q is padding."""
    x = torch.randn(20, 2, 16, device=device, requires_grad=True)
    cu_seqlens, slopes = cumulative([0] * n_docs), torch.rand(n_docs, 2, device=device)
    o = flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 0, 0, alibi_slopes=slopes)
    (dx,) = torch.autograd.grad(o.sum(), x)
    assert not o.any() and not dx.any()


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize(
    ("descale", "message"),
    [
        pytest.param({"requires_grad": True}, "must not require a gradient", id="gradient"),
        pytest.param({"device": "meta"}, r"must be \(2,\) float32 on .*; got \(2,\) float32 on meta", id="device"),
        pytest.param({"dtype": torch.float64}, r"must be \(2,\) float32 on .*; got \(2,\) float64 on", id="dtype"),
    ],
)
def test_bad_descale_is_named(name, descale, message, device):
    x = torch.randn(1, 20, 2, 16, device=device).to(FP8)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        dense(x, **{name: torch.ones(2, **{"device": device} | descale)})


def test_the_default_dtype_does_not_change_descales(device):
    x = torch.randn(1, 20, 2, 16, device=device).to(FP8)
    q_descale = torch.tensor([0.5, 2.0], device=device)
    expected = dense(x, q_descale=q_descale)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(dense(x, q_descale=q_descale), expected)
    finally:
        torch.set_default_dtype(default)
