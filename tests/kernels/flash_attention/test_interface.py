"""Tests the public functions as users of flash-attn call them, with torch's transforms, and with random documents."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fa_kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa_kernels.flash_attention import interface, schedule_cache
from fa_kernels.flash_attention.checks import FP8, window_of
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import LONG_DOCUMENT, causal_schedule
from fa_kernels.flash_attention.tiles import _has_tf32, precision_of
from tests.kernels.flash_attention.support.packed_check import check, draw
from tests.kernels.support.attention_check import DEVICE, GPU, cumulative


def dense_inputs(head_dim=40):
    shapes = (2, 9, 4, head_dim), (2, 11, 2, head_dim), (2, 11, 2, head_dim)
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def with_gradients(function, inputs):
    o = function(*inputs)
    return [o, *torch.autograd.grad(o.square().sum(), inputs)]


def all_equal(ours, expected):
    return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), ...)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        pytest.param(flash_attn_func, dict.fromkeys("qkv", ...) | COMMON, id="dense"),
        pytest.param(
            flash_attn_varlen_func, dict.fromkeys("qkv", ...) | LENGTHS | COMMON | {"block_table": None}, id="varlen"
        ),
    ],
)
def test_signature_is_flash_attns(function, wanted):
    found = inspect.signature(function).parameters.values()
    theirs = {p.name: ... if p.default is p.empty else p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(theirs.items()) == list(wanted.items())
    assert all(p.kind is p.KEYWORD_ONLY for p in found if p.name not in theirs)


def test_positional_arguments_and_the_three_results_are_flash_attns():
    q, k, v = (x.half() for x in dense_inputs())
    o, lse, probabilities = flash_attn_func(q, k, v, 0.0, 0.3, True, (5, 0), 4.0, None, True, True)
    names = {"softmax_scale": 0.3, "causal": True, "window_size": (5, 0), "softcap": 4.0, "deterministic": True}
    expected, expected_lse = flash_attn_func(q, k, v, **names, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    # without dropout, the third result is an empty tensor, as in flash-attn
    assert probabilities.shape == (0,) and probabilities.dtype == q.dtype and probabilities.device == q.device


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0, -30.0])
def test_a_softcap_that_is_not_positive_is_none(softcap):
    q, k, v = (x.detach() for x in dense_inputs(head_dim=8))
    assert torch.equal(flash_attn_func(q, k, v, softcap=softcap), flash_attn_func(q, k, v))
    assert torch.equal(flash_attn_with_kvcache(q, k, v, softcap=softcap), flash_attn_with_kvcache(q, k, v))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((2**31 - 1, 2**31 - 1), (-1, -1)),
        ((10**12, 0), (-1, 0)),
        ((-7, 2**30), (-1, -1)),
        ([3, -1], (3, -1)),
        ((12, 2**30 - 1), (12, 2**30 - 1)),
        (torch.tensor([5, 0]), (5, 0)),
        (np.array([5, 0]), (5, 0)),
        ((np.int64(5), np.int32(0)), (5, 0)),
        (torch.Size([5, 0]), (5, 0)),
    ],
    ids=str,
)
def test_windows_are_tokens_or_unbounded(window, expected):
    """Like flash-attn 2.8, our functions accept a window_size that is any pair of integers."""
    assert window_of(window) == expected


def test_a_window_that_overflows_int32_hides_no_key():
    q = torch.randn(1, 5, 1, 8, device=DEVICE, requires_grad=True)
    k = torch.randn(1, 6, 1, 8, device=DEVICE, requires_grad=True)
    expected = with_gradients(lambda q, k: flash_attn_func(q, k, k), [q, k])
    window = {"window_size": (2**31 - 1, 2**31 - 1)}
    assert all_equal(with_gradients(lambda q, k: flash_attn_func(q, k, k, **window), [q, k]), expected)
    cu_q, cu_k = cumulative([5]), cumulative([6])
    assert torch.equal(flash_attn_varlen_func(q[0], k[0], k[0], cu_q, cu_k, 5, 6, **window), expected[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 5], ids=["pages-of-16", "pages-of-5"])
def test_keys_may_lie_in_pages(page_size):
    """Unused pages hold NaN, and unused entries of the block table are invalid."""
    lengths_q, lengths_k = [5, 0, 3, 1], [21, 7, 0, 16]
    q, k, v, do, _ = draw(9, 44, 2, 1, 8, 16)
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    pages_each = -(-max(lengths_k) // page_size) + 1
    order = torch.randperm(4 * pages_each, device=DEVICE)
    table = order.to(torch.int32).view(4, pages_each)
    token = torch.arange(44, device=DEVICE)
    document = torch.searchsorted(cu_k, token, right=True) - 1
    place = token - cu_k[document]
    page, row = table[document, place // page_size].long(), place % page_size
    pages = []
    for x in (k, v):
        stored = x.new_full((4 * pages_each, page_size, *x.shape[1:]), torch.nan)
        stored[page, row] = x.detach()
        pages.append(stored.requires_grad_())
    for i, length in enumerate(lengths_k):
        table[i, -(-length // page_size) :] = -1 if i % 2 else 2**30
    options = {"causal": True, "window_size": (12, 0), "return_lse": True}
    o, lse = flash_attn_varlen_func(q, *pages, cu_q, cu_k, 5, 21, block_table=table, **options)
    expected, expected_lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 21, **options)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    dq, *dpages = torch.autograd.grad(o, (q, *pages), do)
    exact = torch.autograd.grad(expected, (q, k, v), do)
    assert all_equal([dq, *(x[page, row] for x in dpages)], exact)
    for x in dpages:
        x[page, row] = 0.0
        assert not x.any()


@pytest.mark.slow
def test_pages_under_compile():
    q, pages = torch.randn(7, 4, 16, device=DEVICE), torch.randn(6, 16, 2, 16, device=DEVICE)
    table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32, device=DEVICE)

    def attend(cu_q, cu_k):
        return flash_attn_varlen_func(
            q, pages, pages, cu_q, cu_k, 7, 32, causal=True, window_size=(20, 0), block_table=table
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (([3, 4], [30, 17]), ([0, 7], [1, 32])):
            cu = [cumulative(x) for x in lengths]
            assert torch.equal(compiled(*cu), attend(*cu))


@pytest.mark.slow
def test_other_lengths_compile_nothing_anew():
    """max_seqlen, which flash-attn's signature requires, has a different value in each call."""

    def attend(q, cu, longest):
        return flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, 0.0, None, True, return_attn_probs=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    q = torch.randn(12, 1, 8, device=DEVICE)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([3, 9], [12, 0], [5, 7]):
            arguments = q, cumulative(lengths), max(lengths)
            assert all_equal(compiled(*arguments), attend(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"window_size": 4}, r"window_size must be two integers, .*; got 4", id="window-int"),
        pytest.param({"window_size": (None, 0)}, r"got \(None, 0\)", id="window-none"),
        pytest.param({"window_size": (1.5, 0)}, r"got \(1.5, 0\)", id="window-of-a-fraction"),
        pytest.param({"window_size": (1, 2, 3)}, r"got \(1, 2, 3\)", id="window-of-three"),
        pytest.param({"out_dtype": torch.int32}, "out_dtype must be float16, .*; got int32", id="out-dtype"),
        pytest.param({"sinks": torch.zeros(4, device="meta")}, "sinks must be .* on meta", id="sinks"),
        pytest.param({"alibi_slopes": torch.zeros(4, device="meta")}, "alibi_slopes must .* on meta", id="alibi"),
        pytest.param({"sinks": [0.0] * 4}, r"sinks must be \(4,\) float32 .*; got a list", id="list-of-sinks"),
        pytest.param({"alibi_slopes": [0.5] * 4}, r"alibi_slopes must be \(4,\) .*; got a list", id="list-of-slopes"),
        pytest.param({"softcap": 1000.1}, "softcap must be .* at most 1000, .*; got 1000.1", id="softcap"),
        pytest.param({"k": torch.ones(2, 11, 0, 40)}, "same tokens and heads", id="no-k-heads"),
        pytest.param(
            {"q": torch.ones(2, 9, 4, 0), "k": torch.ones(2, 11, 2, 0), "v": torch.ones(2, 11, 2, 0)},
            "head_dim must be from 1 to 256; got 0", id="no-width",
        ),
        pytest.param(
            {"k": torch.ones(2, 11, 0, 40), "v": torch.ones(2, 11, 0, 40)}, "n_kv_heads; got 4 and 0", id="no-kv-heads"
        ),
        pytest.param(
            {"q": torch.ones(2, 9, 4, 40).to(FP8), "k": torch.ones(2, 11, 0, 40).to(FP8),
             "v": torch.ones(2, 11, 0, 40).to(FP8), "q_descale": torch.ones(0)},
            "n_kv_heads; got 4 and 0", id="no-kv-heads-in-fp8",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kept", [False, True])
def test_bad_input_is_named(arguments, message, kept, monkeypatch):
    """A call with bad input always raises its error, even if an earlier call has left a schedule in the cache."""
    monkeypatch.setattr(schedule_cache, "_CACHED", {})
    inputs = dict(zip("qkv", dense_inputs(), strict=True))
    device = inputs["q"].device
    arguments = {
        name: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x for name, x in arguments.items()
    }
    if kept:
        flash_attn_func(**inputs)
    with pytest.raises(ValueError, match=message):
        flash_attn_func(**inputs | arguments)


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 2, 8)])
def test_another_rank_in_a_packed_stream_is_named(shape):
    x = torch.ones(shape)
    with pytest.raises(ValueError, match=r"q, k and v must be \(tokens, heads, head_dim\); got .*8\)"):
        flash_attn_packed(x, x, x, causal_schedule(None, 5, torch.device("cpu")))


@pytest.mark.slow
def test_each_function_takes_a_window_in_a_tensor():
    q, k, v = dense_inputs()
    cu = cumulative([q.shape[1]]), cumulative([k.shape[1]])
    wanted, found = (
        (
            flash_attn_func(q, k, v, window_size=window),
            flash_attn_varlen_func(q[0], k[0], v[0], *cu, q.shape[1], k.shape[1], window_size=window),
            flash_attn_with_kvcache(q, k, v, window_size=window),
        )
        for window in ((5, 0), torch.tensor([5, 0]))
    )
    assert all_equal(found, wanted)


def test_bad_window_of_a_cache_is_named():
    q, k, v = dense_inputs()
    with pytest.raises(ValueError, match=r"window_size must be two integers, .*; got None"):
        flash_attn_with_kvcache(q, k, v, window_size=None)


PAGES = torch.zeros(3, 16, 2, 16, device=DEVICE)
TABLE = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"block_table": TABLE[:1]}, r"block_table must be \(2, pages .*got \(1, 2\) int32", id="rows"),
        pytest.param({"block_table": TABLE[:, :0]}, r"got \(2, 0\) int32", id="no-columns"),
        pytest.param({"block_table": TABLE.tolist()}, r"block_table must be \(2, pages .*got a list", id="list"),
        pytest.param({"block_table": TABLE.long()}, r"int32 on .*; got \(2, 2\) int64", id="dtype"),
        pytest.param(
            {"block_table": TABLE + 3}, r"block_table must hold pages from 0 to 2; got \[3, 3, 3\]", id="no-such-page"
        ),
        pytest.param({"block_table": TABLE - 1}, r"from 0 to 2; got \[-1, -1, -1\]", id="negative"),
        pytest.param({"v": PAGES[:2]}, r"same page size, both at least 1; got \(3, 16, 2, 16\) and \(2, ", id="v"),
        pytest.param({"k": PAGES[:0], "v": PAGES[:0]}, "same page size, both at least 1", id="no-pages"),
        pytest.param({"max_seqlen_k": 33}, "must be at most 32, .*; got 33", id="max-seqlen"),
        pytest.param({"max_seqlen_k": 8}, "max_seqlen_k must be at least .* document, 20; got 8", id="short"),
        pytest.param({"max_seqlen_k": None}, "max_seqlen_k must be at least .* document, 20; got None", id="none"),
    ],
)
def test_bad_pages_are_named(arguments, message, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_DEBUG", "1")
    right = {
        "q": torch.zeros(4, 4, 16, device=DEVICE), "k": PAGES, "v": PAGES, "cu_seqlens_q": cumulative([2, 2]),
        "cu_seqlens_k": cumulative([20, 9]), "max_seqlen_q": 2, "max_seqlen_k": 20, "block_table": TABLE,
    }  # fmt: skip
    flash_attn_varlen_func(**right)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**right | arguments)


@pytest.mark.slow
def test_reentrant_checkpointing_changes_nothing():
    """tests/memory/test_checkpointing.py tests checkpointing that is not reentrant."""

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    inputs = dense_inputs()
    expected = with_gradients(attend, inputs)
    for x in inputs:
        x.grad = None
    o = checkpoint(attend, *inputs, use_reentrant=True)
    o.square().sum().backward()
    assert all_equal([o, *(x.grad for x in inputs)], expected)


def test_autocast_gives_half_precision_and_mixed_dtypes_are_refused():
    """Like flash-attn, our attention casts nothing and refuses mixed dtypes."""
    project = torch.nn.Linear(40, 40, device=DEVICE)
    q, k, v = dense_inputs()
    with torch.autocast(DEVICE, torch.float16):
        o = flash_attn_func(project(q), project(k), project(v))
        with pytest.raises(ValueError, match=r"the same dtype.*got float16, float32 and float32"):
            flash_attn_func(project(q), k, v)
    assert o.dtype == torch.float16
    gradients = torch.autograd.grad(o.float().sum(), (project.weight, q))
    assert all(x.dtype == torch.float32 and torch.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize(
    ("name", "allowed", "forbidden"),
    [("fp32_precision", "tf32", "ieee"), ("allow_tf32", True, False)],
    ids=["new-name", "old-name"],
)
def test_one_tf32_product_only_where_torch_allows_it(name, allowed, forbidden):
    matmul, x = torch.backends.cuda.matmul, torch.ones(1)
    before = matmul.fp32_precision
    try:
        setattr(matmul, name, allowed)
        assert precision_of(x) == "tf32" and precision_of(x.half()) == "ieee"
        setattr(matmul, name, forbidden)
        assert precision_of(x) == "tf32x3" and precision_of(x.half()) == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("capability", "precision"),
    [pytest.param((7, 5), "ieee", id="turing"), pytest.param((8, 0), "tf32x3", id="ampere")],
)
def test_gpus_without_tf32_get_no_tf32_product(monkeypatch, capability, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(dtype=torch.float32, is_cuda=True, device=torch.device("cuda", 0))
    _has_tf32.cache_clear()
    try:
        assert precision_of(x) == precision
    finally:
        _has_tf32.cache_clear()


@pytest.mark.slow
def test_a_functional_call_gives_the_same_gradients():
    """Like flash-attn, our attention supports functional_call, but not torch.func's grad and vmap."""
    project = torch.nn.Linear(40, 40, device=DEVICE)
    q, k, v = dense_inputs()
    weights = {name: x.detach().clone().requires_grad_() for name, x in project.named_parameters()}
    o = flash_attn_func(torch.func.functional_call(project, weights, (q,)), k, v)
    expected = flash_attn_func(project(q), k, v)
    ours, theirs = (
        torch.autograd.grad(x.sum(), list(y)) for x, y in ((o, weights.values()), (expected, project.parameters()))
    )
    assert torch.equal(o, expected) and all_equal(ours, theirs)


def test_flops_are_counted():
    """torch counts two matmuls for the forward pass and five for the backward pass, each over all pairs of a query and
    a key.
    """
    q, k, v, do, _ = draw(13, 17, 4, 2, 16, 24)
    cu_q, cu_k = cumulative([13]), cumulative([17])
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 17, causal=True).backward(do)
    forward, backward = 2 * 13 * 17 * 4 * (16 + 24), 2 * 13 * 17 * 4 * (3 * 16 + 2 * 24)
    assert counter.get_total_flops() == forward + backward


def test_flops_of_a_batch_are_those_of_its_sequences():
    inputs = dense_inputs()
    with FlopCounterMode(display=False) as counter:
        flash_attn_func(*inputs).sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 9 * 11 * 4 * 40  # 2 sequences, 2 forward + 5 backward matmuls


DOCUMENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)
WINDOWS = st.integers(-1, 12) | st.just(-1)
# derandomize: hypothesis generates the same documents in each run
ANY = settings(max_examples=200 if GPU else 6, deadline=None, derandomize=True)


@pytest.mark.slow
@ANY
@given(DOCUMENTS, st.booleans(), WINDOWS, WINDOWS, st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_any_documents_equal_the_reference(pairs, causal, left, right, padding, tail, capped):
    """cu_seqlens may be padded, and tokens may follow the last document."""
    lengths_q, lengths_k = ([*x, *[0] * padding] for x in zip(*pairs, strict=True))
    q, k, v, do, dlse = draw(sum(lengths_q) + tail + 1, sum(lengths_k) + tail + 1, 2, 1, 8)
    options = {"causal": causal, "window_size": (left, right), "softcap": 2.0 if capped else 0.0}
    check(q, k, v, do, dlse, cumulative(lengths_q), cumulative(lengths_k), **options)


@ANY
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 60), min_size=1, max_size=6), st.booleans())
def test_any_wrong_documents_stay_in_bounds(edges, causal):
    """The memory around q, k and v holds NaN.

    ALiBi makes the kernels look up each token's document.
    """
    memory = torch.full((3, 150, 1, 8), torch.nan, device=DEVICE)
    memory[:, 50:100] = 1.0
    cu = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    slopes = torch.zeros(len(edges) - 1, 1, device=DEVICE) if len(edges) > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fa_kernels.flash_attention.interface.may_read", lambda _: False)
        o = flash_attn_varlen_func(*memory[:, 50:100], cu, cu, 50, 50, causal=causal, alibi_slopes=slopes)
    assert torch.isfinite(o).all()


# The interpreter is slow, so this file skips the head_dims that test_flash_attention.py tests.
ELSEWHERE = {8, 16, 40, 64, 80, 96, 128, 192, 256}
OTHER_HEAD_DIMS = [d for d in range(8, 257, 8) if d not in ELSEWHERE] if GPU else [24, 136, 224]


@pytest.mark.parametrize("head_dim", OTHER_HEAD_DIMS)
def test_any_multiple_of_eight_is_a_head_dim(head_dim):
    cu = cumulative([9, 4])
    check(*draw(13, 13, 1, 1, head_dim, dtype=torch.float16), cu, cu, causal=True)


@pytest.mark.gpu
def test_pages_are_gathered_without_a_host_sync():
    cu_q, cu_k = cumulative([2, 2]), cumulative([20, 9])
    q = torch.randn(4, 4, 16, device=DEVICE)
    flash_attn_varlen_func(q, PAGES, PAGES, cu_q, cu_k, 2, 20, block_table=TABLE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(q, PAGES, PAGES, cu_q, cu_k, 2, 20, block_table=TABLE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("max_seqlen", "seqlen"),
    [(LONG_DOCUMENT, LONG_DOCUMENT), (LONG_DOCUMENT - 1, None), (torch.tensor(LONG_DOCUMENT), None)],
    ids=["long", "not", "tensor"],
)
def test_a_long_max_seqlen_sets_the_length_class(max_seqlen, seqlen, monkeypatch):
    asked = []
    build = interface.build_schedule
    monkeypatch.setattr(interface, "build_schedule", lambda *x, **y: asked.append(y["seqlen"]) or build(*x, **y))
    q, k, v = (torch.randn(7, 2, 16, device=DEVICE) for _ in range(3))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
    flash_attn_varlen_func(q, k, v, cu, cu, 7, max_seqlen, causal=True)
    assert asked == [seqlen]


def test_sinks_may_have_any_stride():
    """Sinks with a stride are copied, because kernels assume stride 1."""
    q, k, v = dense_inputs()
    schedule = causal_schedule(None, 9, torch.device(DEVICE))
    given = torch.tensor([1.0, -3.0, 2.0, -4.0, 0.5, -5.0, 3.0], device=DEVICE)
    results = []
    for copied in (False, True):
        leaf = given.clone().requires_grad_()
        sinks = leaf[::2].contiguous() if copied else leaf[::2]
        dense = flash_attn_func(q, k, v, sinks=sinks)
        packed = flash_attn_packed(q[0], k[0, :9], v[0, :9], schedule, sinks=sinks)
        results.append([dense, packed, *torch.autograd.grad(dense.sum() + packed.square().sum(), (q, leaf))])
    assert all_equal(*results)
