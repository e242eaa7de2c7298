"""Compares the portable Triton kernels with a reference in fp64, in the interpreter or compiled on a GPU.

By default, the interpreter skips half of the cases of packed documents. The interpreter also skips some cases that
combine a feature with full attention. With DOCUMENT_CASES=all, the interpreter runs all cases.
"""

import math
import os

import pytest
import torch

from fa_kernels import flash_attn_func, flash_attn_varlen_func
from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import Schedule, alignment, build_schedule, causal_schedule
from tests.kernels.flash_attention.support.packed_check import check, draw
from tests.kernels.support.attention_check import DEVICE, GPU, cumulative
from tests.support.marks import slow, slow_if

DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]  # Triton's interpreter computes bf16 incorrectly
DTYPES += [torch.float32]


LENGTHS = [
    pytest.param([40], id="one-document"),
    pytest.param([1], id="one-token"),
    pytest.param([32, 64], id="tile-edges"),
    pytest.param([33, 31, 65], id="one-row-over"),
    pytest.param([3, 1, 0, 17, 2, 50, 0], id="ragged-and-empty"),
    pytest.param([0, 0, 5], id="empty-first"),
    pytest.param([2] * 24, id="many-short"),
]


EVERY_CASE = GPU or os.environ.get("DOCUMENT_CASES") == "all"
DOCUMENTS = [
    pytest.param(*lengths.values, causal, dtype, id=f"{lengths.id}-{mask}-{dtype}", marks=slow_if(number % 2 == 1))
    for number, lengths in enumerate(LENGTHS)
    for mask, causal in (("causal", True), ("full", False))
    for dtype in DTYPES
    if EVERY_CASE or (number + causal + (dtype == torch.float32)) % 2 == 0
]


@pytest.mark.parametrize(("lengths", "causal", "dtype"), DOCUMENTS)
def test_packed_documents_equal_dense_attention(lengths, causal, dtype):
    cu = cumulative(lengths)
    check(*draw(sum(lengths), sum(lengths), 2, 1, 16, dtype=dtype), cu, cu, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 80, *slow(8, 16, 20, 40, 96, 128, 192, 256)])
def test_every_head_dim_equals_dense_attention(head_dim):
    cu = cumulative([35, 14])
    check(*draw(49, 49, 2, 2, head_dim), cu, cu, causal=True)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [
        pytest.param(192, 128, marks=pytest.mark.slow),
        pytest.param(24, 80),
        pytest.param(96, 16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_may_have_another_width_than_keys(head_dim, v_head_dim):
    cu = cumulative([35, 14])
    check(*draw(49, 49, 2, 1, head_dim, v_head_dim), cu, cu, causal=True)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads"),
    [
        pytest.param(4, 4, id="mha", marks=pytest.mark.slow),
        pytest.param(4, 2, id="gqa"),
        pytest.param(6, 1, id="mqa", marks=pytest.mark.slow),
    ],
)
def test_query_heads_may_share_kv_heads(n_heads, n_kv_heads):
    cu = cumulative([35, 14])
    check(*draw(49, 49, n_heads, n_kv_heads, 16), cu, cu, causal=True)


UNEVEN = ([5, 40, 3, 0, 7], [9, 20, 0, 4, 70])


@pytest.mark.parametrize("window", [(-1, -1), (7, 0), *slow((20, 5), (0, 0), (-1, 3))], ids=str)
@pytest.mark.parametrize("causal", [True, *slow(False)], ids=["causal", "full"])
def test_windows_allow_more_or_fewer_keys_than_queries(causal, window):
    """Causal masks and windows align the last query with the last key."""
    check(*draw(55, 103, 2, 1, 16, 32), *map(cumulative, UNEVEN), causal=causal, window_size=window)


SOFTCAP = {"softcap": 2.0}
ALIBI = {"alibi_slopes": torch.tensor([0.02, 0.3, 0.0, 1.0], device=DEVICE)}
ALIBI_PER_DOCUMENT = {"alibi_slopes": torch.rand(5, 4, device=DEVICE)}
SINKS = {"sinks": torch.tensor([0.5, -1.0, 4.0, 0.0], device=DEVICE)}
SCALE = {"softmax_scale": 0.7}


FEATURES = {
    "softcap": SOFTCAP,
    "alibi": ALIBI,
    "alibi-per-document": ALIBI_PER_DOCUMENT,
    "sinks": SINKS,
    "all": SCALE | SOFTCAP | ALIBI_PER_DOCUMENT | SINKS,
}


@pytest.mark.parametrize(
    ("features", "causal", "window"),
    [
        pytest.param(features, causal, window, id=f"{name}-{mask}", marks=slow_if(mask == "full" or not fast))
        for name, features in FEATURES.items()
        for mask, causal, window in (("causal-window", True, (9, 2)), ("full", False, (-1, -1)))
        if EVERY_CASE or mask != "full" or name in ("alibi", "all")
        for fast in (name in ("softcap", "all"),)
    ],
)
def test_every_feature_equals_dense_attention(features, causal, window):
    """Each case has grouped heads, uneven packed documents, rows that see no key, and two blocks of head columns."""
    tensors = draw(55, 103, 4, 2, 24 if "softcap" in features else 48)
    check(*tensors, *map(cumulative, UNEVEN), causal=causal, window_size=window, **features)


def test_large_scores_saturate_the_softcap():
    q, k, v, do, dlse = draw(33, 33, 1, 1, 16)
    cu = cumulative([33])
    check(q.detach() * 100, k, v, do, dlse, cu, cu, causal=True, softcap=5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["portable", "auto"])
@pytest.mark.parametrize("spread", [1, 8], ids=["usual", "saturated"])
@pytest.mark.parametrize("softcap", [5.0, 30.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcap_is_accurate_in_each_dtype(dtype, head_dim, softcap, spread, chosen, monkeypatch):
    """bf16 and fp16 use different instructions for tanh. `spread` is the standard deviation of the scores."""
    monkeypatch.setenv(backend.VARIABLE, chosen)
    q, *others = draw(1024, 1024, 4, 2, head_dim, dtype=dtype)
    check(q.detach() * spread, *others, cumulative([1024]), cumulative([1024]), causal=True, softcap=softcap)


def test_rows_outside_every_document_give_zero():
    cu = cumulative([30, 12, 0, 0])
    q, k, v, do, dlse = draw(50, 50, 2, 1, 16)
    o, lse = flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, causal=True, return_lse=True)
    assert torch.all(o[42:] == 0) and torch.all(lse[:, 42:] == float("-inf"))
    grads = torch.autograd.grad(o, (q, k, v), do)
    assert all(torch.all(g[42:] == 0) for g in grads)
    check(q, k, v, do, dlse, cu, cu, causal=True)


@pytest.mark.slow
def test_partial_outputs_in_fp32_merge_to_the_whole():
    q, k, v, do, _ = draw(40, 64, 2, 1, 16, dtype=torch.float16)
    cu_q = cumulative([40])
    whole = flash_attn_varlen_func(q, k, v, cu_q, cumulative([64]), 40, 64, out_dtype=torch.float32)
    halves = [
        flash_attn_varlen_func(
            q, k[s], v[s], cu_q, cumulative([32]), 40, 32, return_lse=True, out_dtype=torch.float32
        )
        for s in (slice(0, 32), slice(32, 64))
    ]  # fmt: skip
    assert all(o.dtype == torch.float32 for o, _ in halves)
    weights = torch.stack([lse for _, lse in halves]).softmax(dim=0)  # [2, H, M]
    merged = sum(w.T[..., None] * o for w, (o, _) in zip(weights, halves, strict=True))
    torch.testing.assert_close(merged, whole, rtol=1e-3, atol=1e-3)
    for ours, exact in zip(
        torch.autograd.grad(merged, (q, k, v), do.float(), retain_graph=True),
        torch.autograd.grad(whole, (q, k, v), do.float()),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=5e-3, atol=5e-3)


def test_fp8_allows_sinks_that_require_a_gradient():
    """If a model is evaluated without torch.no_grad, its sinks require a gradient."""
    q, k, v, *_ = (x.detach().to(torch.float8_e4m3fn) for x in draw(20, 20, 2, 1, 16))
    sinks = torch.zeros(2, device=DEVICE)
    cu = cumulative([20])
    with_gradient, without = (
        flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, sinks=x) for x in (sinks.clone().requires_grad_(), sinks)
    )
    assert with_gradient.requires_grad and torch.equal(with_gradient, without)


@pytest.mark.parametrize("head_dim", [64, *slow(96)])
def test_fp8_is_as_accurate_as_its_inputs(head_dim):
    """e4m3 values are exact in fp32. The only errors come from rounding p to 11 bits and from rounding the output."""
    q, k, v, *_ = (x.detach() for x in draw(70, 70, 4, 2, head_dim))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    descales = [torch.tensor(x, device=DEVICE) for x in ([0.5, 2.0], [1.5, 0.25], [3.0, 0.125])]
    names = ("q_descale", "k_descale", "v_descale")
    cu = cumulative([37, 0, 33])
    o, lse = flash_attn_varlen_func(
        q, k, v, cu, cu, 37, 37, causal=True, return_lse=True, out_dtype=torch.float32,
        **dict(zip(names, descales, strict=True)),
    )  # fmt: skip
    full = [
        x.double() * s.repeat_interleave(x.shape[1] // 2)[:, None] for x, s in zip((q, k, v), descales, strict=True)
    ]
    exact, exact_lse = attention_reference(*full, cu, cu, causal=True)
    # In sums of fp8 products, Hopper's tensor cores keep 13 bits below the largest exponent (arXiv:2412.19437,
    # section 3.3.2).
    largest = math.prod(x.norm(dim=-1).max().item() for x in full[:2]) * head_dim**-0.5
    lse_error = 2**-13 * largest if GPU else 1e-5
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=lse_error)
    torch.testing.assert_close(o.double(), exact, rtol=2**-10, atol=2**-10 * full[2].abs().max().item())


def test_dense_batch_is_a_packed_one_with_equal_documents():
    q, k, v, *_ = draw(3 * 21, 3 * 33, 4, 2, 16)
    o, lse = flash_attn_func(
        *(x.unflatten(0, (3, -1)) for x in (q, k, v)), causal=True, softmax_scale=0.3, return_lse=True
    )
    cu_q, cu_k = cumulative([21] * 3), cumulative([33] * 3)
    packed, packed_lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 21, 33, causal=True, softmax_scale=0.3, return_lse=True
    )
    assert torch.equal(o.flatten(0, 1), packed)
    assert lse.shape == (3, 4, 21) and torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


@pytest.mark.slow
def test_inputs_and_gradients_need_not_be_contiguous():
    """The gradient of o is a broadcast tensor."""
    qkv = torch.randn(45, 3, 2, 16, device=DEVICE)
    q, k = qkv[:, 0].requires_grad_(), qkv[:, 1].requires_grad_()
    v = qkv[:, 2].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    cu = cumulative([45])
    grads = []
    for make in (lambda x: x, lambda x: x.contiguous()):
        o = flash_attn_varlen_func(make(q), make(k), make(v), cu, cu, 45, 45, causal=True)
        grads.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
    for strided, contiguous in zip(*grads, strict=True):
        assert torch.equal(strided, contiguous)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "alibi"), [(1, False), (2, True)], ids=["one", "two-with-alibi"])
def test_a_batch_may_have_any_layout(batch, alibi):
    """The kernels cannot read the gradient of o in place, so the gradient of o must be copied."""
    q, k, v = torch.randn(3, batch, 2, 21, 16, device=DEVICE)
    slopes = torch.rand(2, device=DEVICE) if alibi else None
    do = torch.randn(batch, 2, 21, 16, device=DEVICE).transpose(1, 2)
    results = []
    for lay_out in (
        lambda *x: [y.transpose(1, 2) for y in x],
        lambda *x: [y.transpose(1, 2).contiguous() for y in x],
        lambda *x: torch.stack(x).permute(1, 3, 0, 2, 4).contiguous().unbind(2),
    ):
        leaves = [x.detach().requires_grad_() for x in lay_out(q, k, v)]
        o, lse = flash_attn_func(*leaves, causal=True, alibi_slopes=slopes, return_lse=True)
        alone = flash_attn_func(*leaves, causal=True, alibi_slopes=slopes)
        assert o.shape == do.shape and lse.shape == (batch, 2, 21)
        for x in (o, alone):
            results.append((x, *torch.autograd.grad(x, leaves, do)))
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert one.shape == other.shape and torch.equal(one, other)


def test_schedule_is_shared_with_the_varlen_function():
    q, k, v, *_ = draw(49, 49, 2, 1, 16)
    cu = cumulative([35, 0, 14])
    shared = flash_attn_packed(q, k, v, causal_schedule(cu, 49, q.device))
    assert torch.equal(shared, flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, causal=True))
    alone = flash_attn_packed(q, k, v, causal_schedule(None, 49, q.device))
    one = cumulative([49])
    assert torch.equal(alone, flash_attn_varlen_func(q, k, v, one, one, 49, 49, causal=True))


@pytest.mark.slow
def test_documents_do_not_leak():
    cu = cumulative([37, 40])
    q, k, v, do, _ = draw(77, 77, 2, 1, 16)
    results = []
    for filler in (None, 3.0, torch.inf, torch.nan):
        inputs = [x.detach().clone() for x in (q, k, v)]
        if filler is not None:
            for x in inputs:
                x[:37] *= filler
        inputs = [x.requires_grad_() for x in inputs]
        o = flash_attn_varlen_func(*inputs, cu, cu, 40, 40, causal=True)
        results.append([x[37:] for x in (o, *torch.autograd.grad(o, inputs, do))])
    for others in results[1:]:
        for before, after in zip(results[0], others, strict=True):
            assert torch.equal(before, after)


def test_nan_shows_in_its_own_document():
    """A NaN in `v` or `do` of one token reaches every dependent result in the token's document."""
    cu = cumulative([37, 40])
    q, k, v, do, _ = draw(77, 77, 2, 1, 16)
    v = v.detach().clone()
    v[20] = torch.nan
    o = flash_attn_varlen_func(q, k, v.requires_grad_(), cu, cu, 40, 40, causal=True)
    assert torch.isfinite(o[:20]).all() and torch.isnan(o[20:37]).all() and torch.isfinite(o[37:]).all()
    do = do.detach().clone()
    do[30] = torch.nan
    _, _, dv = torch.autograd.grad(o, (q, k, v), do)
    assert torch.isnan(dv[:31]).all() and torch.isfinite(dv[37:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "several"), [([20], False), ([13, 7], True)], ids=str)
def test_both_passes_know_whether_there_are_several_documents(lengths, several, monkeypatch):
    """Hopper's kernels isolate NaN only if the schedule says that there are several documents."""
    known = []
    for name in ("forward", "backward"):
        original = getattr(backend, name)

        def spy(*arguments, original=original):
            known.extend(x.crosses_documents for x in arguments if isinstance(x, Schedule))
            return original(*arguments)

        monkeypatch.setattr(backend, name, spy)
    q, k, v, *_ = draw(20, 20, 2, 1, 16)
    cu = cumulative(lengths)
    for o in (
        flash_attn_varlen_func(q, k, v, cu, cu, 20, 20),
        flash_attn_packed(q, k, v, causal_schedule(cu, 20, q.device)),
        flash_attn_func(*(x.unflatten(0, (1 + several, -1)) for x in (q, k, v))),
    ):
        o.sum().backward()
    # `crosses_documents` is True if there are several documents. With cu_seqlens, `crosses_documents` is always True,
    # because additional tokens can follow the last document.
    assert known == [True, True, several] * 2


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_operators_pass_opcheck(batched):
    q, k, v, *_ = draw(20, 20, 2, 1, 16)
    if batched:
        q, k, v = (x.detach().unflatten(0, (2, 10)).requires_grad_() for x in (q, k, v))
    cu = cumulative([13, 7])
    schedule = causal_schedule(cu, 20, q.device).tensors()
    alibi = [torch.rand(1, 2, device=DEVICE), *alignment(cu, cu, 20)]
    sinks = torch.rand(2, device=DEVICE, requires_grad=True)
    torch.library.opcheck(
        torch.ops.flash_attention.forward,
        (q, k, v, schedule, alibi, sinks, None, 0.25, 3.0, torch.float32, False, True, "medium"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    def attend(q, k, v, cu):
        return flash_attn_packed(q, k, v, causal_schedule(cu, q.shape[0], q.device))

    q, k, v, *_ = draw(40, 40, 2, 1, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([10, 30], [40, 0], [1, 39]):
            cu = cumulative(lengths)
            assert torch.equal(compiled(q, k, v, cu), attend(q, k, v, cu))


Q = torch.empty(8, 4, 16, device=DEVICE)
KV = torch.empty(8, 2, 16, device=DEVICE)
CU = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
FP8_WITH_GRADIENT = (*[x.to(torch.float8_e4m3fn).requires_grad_() for x in (Q, KV, KV)], CU, CU)
DECREASING = torch.tensor([0, 8, 3], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((Q[:, :3], KV, KV, CU, CU), "multiple of n_kv_heads; got 3 and 2", id="heads"),
        pytest.param((Q, KV, KV[:, :1], CU, CU), "same tokens and heads", id="k-and-v"),
        pytest.param((Q, KV[..., :8], KV, CU, CU), "the same head_dim", id="head-dim"),
        pytest.param((*[x.repeat(1, 1, 20) for x in (Q, KV, KV)], CU, CU), "from 1 to 256; got 320", id="wide-head"),
        pytest.param((Q.half(), KV, KV, CU, CU), "the same dtype.*got float16", id="mixed-dtype"),
        pytest.param((Q.double(), KV.double(), KV.double(), CU, CU), "the same dtype.*got float64", id="fp64"),
        pytest.param((Q, KV, KV, CU.long(), CU), "cu_seqlens_q must be .* int32; got .* int64", id="cu-dtype"),
        pytest.param((Q, KV, KV, CU, CU[:1]), "same number of documents; got 1 and 0", id="cu-count"),
        pytest.param((Q, KV, KV, [0, 5], CU), "cu_seqlens_q must be a tensor, .*; got a list", id="cu-list"),
        pytest.param((Q, KV, KV, CU + 1, CU), "cu_seqlens_q must start at 0.*got .1, 9.", id="cu-start"),
        pytest.param((Q, KV, KV, CU, 2 * CU), "cu_seqlens_k must .* end at 8 or before; got .0, 16.", id="cu-beyond"),
        pytest.param((Q, KV, KV, DECREASING, DECREASING), "cu_seqlens_q must .* not decrease", id="cu-decreasing"),
        pytest.param(FP8_WITH_GRADIENT, "float8_e4m3fn q, k and v must not require gradients", id="fp8-gradient"),
        pytest.param((Q[None], KV, KV, CU, CU), r"must be \(total", id="dense-input"),
    ],
)
def test_bad_input_is_named(arguments, message, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_DEBUG", "1")  # on a GPU, cu_seqlens are checked in debug mode only
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(*arguments, 8, 8)


@pytest.mark.parametrize("max_seqlen_k", [7, None])
def test_max_seqlen_too_small_is_named(max_seqlen_k, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_DEBUG", "1")
    message = f"max_seqlen_k must be at least the length of the longest document, 8; got {max_seqlen_k}"
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(Q, KV, KV, CU, CU, 8, max_seqlen_k)


@pytest.mark.parametrize("cu", [[5, 100], [0, 60, 30], [-40, 8, 12]], ids=["beyond", "decreasing", "negative"])
def test_wrong_documents_never_read_out_of_bounds(cu):
    """The memory around q, k and v holds NaN, so that the output shows whether the kernels read that memory."""
    cu = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    schedule = build_schedule(cu, cu, 50, 50, causal=True)
    for name, index in zip(Schedule._fields[:4], schedule.tensors()[:4], strict=True):
        assert index.min() >= 0 and index.max() <= 50, name
    memory = torch.full((3, 150, 2, 16), torch.nan, device=DEVICE)
    memory[:, 50:100] = 1.0
    assert torch.isfinite(flash_attn_packed(*memory[:, 50:100], schedule)).all()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0.0.*got 0.1"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive and finite; got 0.0"),
        ({"softmax_scale": torch.ones(1, requires_grad=True)}, "softmax_scale must not require a gradient"),
        ({"alibi_slopes": torch.ones(Q.shape[1], requires_grad=True)}, "alibi_slopes must not require a gradient"),
        ({"softcap": float("inf")}, "softcap must be finite and at most 1000, and 0 means no soft cap; got inf"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be positive and finite; got nan"),
        ({"alibi_slopes": torch.ones(2, 4)}, r"alibi_slopes must be \(4,\) or \(1, 4\) float32 on .*; got \(2, 4\)"),
        ({"sinks": torch.ones(2)}, r"sinks must be \(4,\) float32 on .*; got \(2,\)"),
        ({"block_table": CU[None]}, r"k must be \(n_pages, page_size, heads, head_dim\); got \(8, 2, 16\)"),
        ({"v_descale": torch.ones(2)}, "q, k and v must be float8_e4m3fn with .*; got float32"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_feature_is_named(extra, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(Q, KV, KV, CU, CU, 8, 8, **extra)
