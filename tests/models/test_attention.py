"""Compares all four attention implementations with a reference in fp64: forward, gradients and mask."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_kernels import flash_attn_func, flash_attn_with_kvcache
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import build_schedule, causal_schedule
from fa_train.models.attention import (
    chunked_attention,
    flash_attention,
    naive_attention,
    require_backend,
    require_softcap,
    sdpa_attention,
)
from tests.memory.support.small import LargestTensor
from tests.support.tolerance import assert_as_accurate

ATTENTIONS = [
    pytest.param(naive_attention, id="naive"),
    pytest.param(sdpa_attention, id="sdpa"),
    pytest.param(partial(chunked_attention, chunk_size=16), id="chunked"),
    pytest.param(flash_attention, id="flash"),
]
LENGTHS = [
    pytest.param([40], 40, id="one-document"),
    pytest.param([1], 1, id="one-token"),
    pytest.param([33, 1, 0, 14], 48, id="ragged-and-empty"),
    pytest.param([0, 16, 16, 0], 32, id="chunk-edges"),
    pytest.param([17, 5], 30, id="tokens-past-the-last-document"),
]


def cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def draw(total: int, n_heads: int, n_kv_heads: int, device: torch.device, dtype=torch.float32) -> list[Tensor]:
    """Returns random q, k, v and gradient of o."""
    shapes = [(total, n_heads, 16), (total, n_kv_heads, 16), (total, n_kv_heads, 16), (total, n_heads, 16)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def with_gradients(attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))]


def check(attention, tensors: list[Tensor], cu_seqlens: Tensor, window: int = -1, **scores) -> None:
    total = tensors[0].shape[0]
    masks: dict[str, Any] = {"causal": True, "window_size": (window, -1)}
    reference = partial(attention_reference, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **masks, **scores)
    schedule = build_schedule(cu_seqlens, cu_seqlens, total, total, **masks)
    ours = with_gradients(partial(attention, schedule=schedule, **scores), *tensors)
    exact = with_gradients(lambda *x: reference(*x)[0], *tensors)
    baseline = with_gradients(lambda *x: reference(*x, dtype=tensors[0].dtype)[0], *tensors)
    # If a query sees only one key, the exact dq and dk are 0. `floor` covers the rounding of two sums of 16 products.
    floor = 32 * torch.finfo(tensors[0].dtype).eps
    for name, result, truth, same_dtype in zip(("o", "dq", "dk", "dv"), ours, exact, baseline, strict=True):
        assert_as_accurate(name, result, truth, same_dtype, floor=floor)
    assert ours[0].dtype == tensors[0].dtype


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("lengths", "total"), LENGTHS)
def test_attention_equals_the_reference(attention, lengths, total, device):
    check(attention, draw(total, 4, 2, device), cumulative(lengths, device))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 3), (4, 1)], ids=["plain", "one-kv-head"])
def test_query_heads_may_share_kv_heads(attention, n_heads, n_kv_heads, device):
    check(attention, draw(48, n_heads, n_kv_heads, device), cumulative([33, 1, 0, 14], device))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scores",
    [
        pytest.param({"softmax_scale": 0.1}, id="scale"),
        pytest.param({"softcap": 0.5}, id="softcap"),
        pytest.param({"softmax_scale": 0.1, "softcap": 0.5}, id="scale-then-softcap"),
    ],
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_scores_are_scaled_and_capped(attention, scores, device):
    tensors, cu_seqlens = draw(48, 4, 2, device), cumulative([33, 1, 0, 14], device)
    if attention is sdpa_attention and "softcap" in scores:
        with pytest.raises(ValueError, match=r"attention=sdpa cannot cap scores, and this model caps them at 0.5"):
            check(attention, tensors, cu_seqlens, **scores)
    else:
        check(attention, tensors, cu_seqlens, window=6, **scores)


def test_a_soft_cap_is_refused_before_training():
    require_softcap(sdpa_attention, 0.0)
    require_softcap(partial(chunked_attention, chunk_size=8), 50.0)
    for attention in (sdpa_attention, partial(sdpa_attention)):
        with pytest.raises(ValueError, match=r"attention=sdpa cannot cap scores, and this model caps them at 50.0"):
            require_softcap(attention, 50.0)
    require_softcap(naive_attention, 1000.1)
    require_softcap(flash_attention, 1000.0)
    for attention in (flash_attention, partial(flash_attention)):
        with pytest.raises(ValueError, match=r"softcap must be finite and at most 1000, .*; got 1000.1"):
            require_softcap(attention, 1000.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_equals_the_reference_in_half_precision(attention, dtype, device):
    check(attention, draw(300, 4, 2, device, dtype), cumulative([129, 1, 0, 150], device))


@pytest.mark.parametrize("scale", [None, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_document_needs_no_cu_seqlens(attention, scale, device):
    tensors = draw(37, 4, 2, device)
    schedules = (causal_schedule(cu_seqlens, 37, device) for cu_seqlens in (None, cumulative([37], device)))
    results = [
        with_gradients(partial(attention, schedule=schedule, softmax_scale=scale), *tensors) for schedule in schedules
    ]
    for with_none, with_one in zip(*results, strict=True):
        torch.testing.assert_close(with_none, with_one, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "elements"),
    [
        pytest.param(naive_attention, 2 * 256 * 256, id="naive-holds-all-scores"),
        # q, k and v have 2 x 256 x 16 elements each; the scores of one chunk have only 2 x 16 x 16 elements
        pytest.param(partial(chunked_attention, chunk_size=16), 2 * 256 * 16, id="chunked-holds-one-chunk"),
    ],
)
def test_the_largest_tensor_has_the_expected_size(attention, elements, device):
    tensors = draw(256, 2, 2, device)
    schedule = causal_schedule(cumulative([100, 156], device), 256, device)
    with LargestTensor() as largest:
        with_gradients(partial(attention, schedule=schedule), *tensors)
    assert largest.elements == elements


def test_chunks_must_hold_a_token(device):
    q, k, v, _ = draw(4, 1, 1, device)
    with pytest.raises(ValueError, match=r"chunk_size must be at least 1 token; got 0"):
        chunked_attention(q, k, v, causal_schedule(None, 4, device), chunk_size=0)


def test_the_interpreter_does_not_compute_bf16(monkeypatch):
    """In bf16, Triton's interpreter would compute wrong results without an error."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    for attend in (
        lambda: flash_attn_func(x, x, x),
        lambda: flash_attn_with_kvcache(x, x, x),
        lambda: require_backend(flash_attention, x.device, x.dtype),
    ):
        with pytest.raises(ValueError, match=r"must be computed in float32 or float16, .*; got bfloat16"):
            attend()
    require_backend(sdpa_attention, x.device, x.dtype)


def test_flash_says_early_that_it_needs_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    for attention in (flash_attention, partial(flash_attention)):
        with pytest.raises(ValueError, match=r"attention=flash needs a CUDA GPU; this run is on cpu"):
            require_backend(attention, cpu)
    require_backend(sdpa_attention, cpu)
    x = torch.randn(1, 8, 2, 16)
    # the kernels can be used without fa_train, and then have no setting `attention`
    for function in (flash_attn_func, flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=r"^flash attention needs tensors on a CUDA GPU; got cpu\. TRITON"):
            function(x, x, x)
