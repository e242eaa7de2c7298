"""Attention over joined q, k and v gives the same results as attention over separate q, k and v."""

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor

import fa_kernels
from fa_kernels import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from fa_kernels.flash_attention import interface
from fa_kernels.flash_attention.reference import attention_reference
from tests.support.marks import slow
from tests.support.tolerance import assert_as_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CU = torch.tensor([0, 11, 11, 18], dtype=torch.int32, device=DEVICE)
CU_K = torch.tensor([0, 5, 14, 27], dtype=torch.int32, device=DEVICE)
# arguments that functions for joined tensors pass to attention, each with a value other than its default
OPTIONS = {
    "softmax_scale": 0.4,
    "causal": True,
    "window_size": (4, 3),
    "softcap": 3.0,
    "alibi_slopes": torch.tensor([0.1, 0.5], device=DEVICE),
    "sinks": torch.tensor([0.3, -0.2], device=DEVICE),
    "out_dtype": torch.float64,
}
FEATURES = {name: OPTIONS[name] for name in OPTIONS if name != "out_dtype"}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).requires_grad_()


def varlen(function, *tensors: Tensor, cu_k: Tensor = CU, **options) -> Tensor:
    return function(*tensors, CU, cu_k, 11, 13, **options)


CASES = [
    pytest.param(
        flash_attn_qkvpacked_func, flash_attn_func, None, (2, 12, 3, 2, 8), id="qkv"
    ),
    pytest.param(flash_attn_kvpacked_func, flash_attn_func, (2, 9, 2, 8), (2, 12, 2, 1, 8), id="kv"),
    pytest.param(
        lambda qkv, **options: flash_attn_varlen_qkvpacked_func(qkv, CU, 11, **options),
        partial(varlen, flash_attn_varlen_func),
        None,
        (20, 3, 2, 8),
        id="varlen-qkv",
    ),
    pytest.param(
        partial(varlen, flash_attn_varlen_kvpacked_func, cu_k=CU_K),
        partial(varlen, flash_attn_varlen_func, cu_k=CU_K),
        (20, 2, 8),
        (30, 2, 1, 8),
        id="varlen-kv",
    ),
]  # fmt: skip


@pytest.mark.parametrize("options", [*slow({}), OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize(("joined_function", "function", "q_shape", "joined_shape"), CASES)
def test_joined_tensors_give_the_results_of_separate_ones(joined_function, function, q_shape, joined_shape, options):
    joined = draw(*joined_shape)
    q = [draw(*q_shape)] if q_shape else []
    ours = joined_function(*q, joined, **options)
    separate = [x.detach().requires_grad_() for x in (*q, *joined.unbind(-3))]
    expected = function(*separate, **options)
    assert torch.equal(ours, expected) and ours.dtype == expected.dtype

    do = torch.randn_like(expected)
    *dq, djoined = torch.autograd.grad(ours, [*q, joined], do)
    gradients = torch.autograd.grad(expected, separate, do)
    assert all(torch.equal(a, b) for a, b in zip((*dq, *djoined.unbind(-3)), gradients, strict=True))


@pytest.mark.parametrize(("joined_function", "function", "q_shape", "joined_shape"), CASES)
def test_lse_and_probabilities_are_returned_if_asked(joined_function, function, q_shape, joined_shape):
    tensors = [draw(*shape).detach() for shape in (q_shape, joined_shape) if shape]
    o, lse = joined_function(*tensors, return_lse=True)
    probs = joined_function(*tensors, return_attn_probs=True)
    assert lse.dtype == torch.float32 and probs[2].shape == (0,) and probs[2].dtype == o.dtype
    assert torch.equal(probs[0], o) and torch.equal(probs[1], lse)


def test_a_packed_form_equals_the_reference():
    """The functions for joined and separate tensors share code, so only the reference shows mistakes in this code."""
    qkv = draw(20, 3, 2, 16)
    results = []
    for dtype in (None, torch.float64, torch.float32):
        leaf = qkv.detach().requires_grad_()
        if dtype is None:
            o = flash_attn_varlen_qkvpacked_func(leaf, CU, 11, **FEATURES)
        else:
            o = attention_reference(*leaf.unbind(1), CU, CU, dtype=dtype, **FEATURES)[0]
        results.append((o, *torch.autograd.grad(o.sum(), leaf)))
    for name, ours, exact, baseline in zip(("o", "dqkv"), *results, strict=True):
        assert_as_accurate(name, ours, exact, baseline, floor=1e-5)


@pytest.mark.parametrize(("joined_function", "function", "q_shape", "joined_shape"), CASES)
def test_parts_are_read_in_place(joined_function, function, q_shape, joined_shape, monkeypatch):
    joined, read = draw(*joined_shape).detach(), []
    forward = interface.differentiable_attention

    def spy(*arguments, **options):
        read.extend(arguments[:3])
        return forward(*arguments, **options)

    monkeypatch.setattr(interface, "differentiable_attention", spy)
    joined_function(*([draw(*q_shape)] if q_shape else []), joined)
    parts = joined.shape[-3]
    pointers = [x.data_ptr() for x in joined.unbind(-3)]
    assert [x.data_ptr() for x in read[-parts:]] == pointers


COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("flash_attn_qkvpacked_func", ["qkv"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
        ("flash_attn_varlen_qkvpacked_func", ["qkv", "cu_seqlens", "max_seqlen"]),
        (
            "flash_attn_varlen_kvpacked_func",
            ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        ),
    ],
)
def test_signatures_are_flash_attns(name, required):
    parameters = inspect.signature(getattr(fa_kernels, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == [*required, *COMMON]
    assert [positional[n] for n in required] == [inspect.Parameter.empty] * len(required)
    assert {n: positional[n] for n in COMMON} == COMMON


def test_bad_shapes_and_dropout_are_named():
    qkv, packed = torch.empty(2, 9, 3, 2, 16, device=DEVICE), torch.empty(18, 3, 2, 16, device=DEVICE)
    q = torch.empty(2, 9, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"qkv must be \(batch, seqlen, 3, heads, head_dim\); got \(18, 3, 2, 16\)"):
        flash_attn_qkvpacked_func(packed)
    with pytest.raises(ValueError, match=r"kv must be \(batch, seqlen, 2, heads, head_dim\); got \(2, 9, 3, 2, 16\)"):
        flash_attn_kvpacked_func(q, qkv)
    with pytest.raises(ValueError, match=r"qkv must be \(total, 3, heads, head_dim\); got \(2, 9, 3, 2, 16\)"):
        flash_attn_varlen_qkvpacked_func(qkv, CU, 20)
    with pytest.raises(ValueError, match=r"kv must be \(total, 2, heads, head_dim\); got \(18, 3, 2, 16\)"):
        flash_attn_varlen_kvpacked_func(packed[:, 0], packed, CU, CU, 20, 20)
    with pytest.raises(ValueError, match="dropout_p must be 0"):
        flash_attn_qkvpacked_func(qkv, 0.1)
