"""The visible ranges in an attention schedule match the mask that attention's definition gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fa_kernels.flash_attention.schedule as schedules
from fa_kernels import flash_attn_func, torch_private
from fa_kernels.flash_attention import schedule_cache
from fa_kernels.flash_attention.schedule import (
    LONG_DOCUMENT,
    SHORT_DOCUMENT,
    VERY_LONG_DOCUMENT,
    Schedule,
    build_schedule,
    causal_schedule,
    dense_schedule,
)

CPU = torch.device("cpu")


def dense_mask(lengths_q, lengths_k, total_q, total_k, causal, window):
    left, right = (window[0], 0) if causal else window
    mask = torch.zeros(total_q, total_k, dtype=torch.bool)
    q0 = k0 = 0
    for m, n in zip(lengths_q, lengths_k, strict=True):
        for i in range(m):
            for j in range(n):
                aligned = i + n - m
                mask[q0 + i, k0 + j] = (left < 0 or j >= aligned - left) and (right < 0 or j <= aligned + right)
        q0, k0 = q0 + m, k0 + n
    return mask


lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(lengths, st.booleans(), st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 3))
def test_ranges_are_the_mask(pairs, causal, left, right, tail):
    lengths_q, lengths_k = zip(*pairs, strict=True)
    total_q, total_k = sum(lengths_q) + tail, sum(lengths_k) + tail
    if not total_q or not total_k:
        return
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    schedule = build_schedule(cu_q, cu_k, total_q, total_k, causal=causal, window_size=(left, right))
    queries, keys = torch.arange(total_q)[:, None], torch.arange(total_k)[None, :]
    mask = dense_mask(lengths_q, lengths_k, total_q, total_k, causal, (left, right))
    by_query = (keys >= schedule.key_start[:, None]) & (keys < schedule.key_end[:, None])
    by_key = (queries >= schedule.query_start[None, :]) & (queries < schedule.query_end[None, :])
    assert torch.equal(by_query, mask)
    assert torch.equal(by_key, mask)
    for ends in (schedule.key_start, schedule.key_end, schedule.query_start, schedule.query_end):
        assert ends.dtype == torch.int32
        assert torch.all(ends.diff() >= 0), "kernels bound a tile's range by its first and last row"


@settings(max_examples=200, deadline=None)
@given(lengths, st.booleans(), st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 3))
def test_tiles_that_queries_see_follow_one_another(pairs, causal, left, right, tail):
    """The key tiles that add to the dQ of a query block are consecutive, as hopper/backward/dq_order.py assumes."""
    block_n, block_m = 4, 2
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in zip(*pairs, strict=True))
    total_q, total_k = cu_q[-1].item() + tail, cu_k[-1].item() + tail
    if not total_q or not total_k:
        return
    schedule = build_schedule(cu_q, cu_k, total_q, total_k, causal=causal, window_size=(left, right))
    tiles = range(-(-total_k // block_n))
    starts = [schedule.query_start[block_n * t].item() // block_m * block_m for t in tiles]
    ends = [schedule.query_end[min(block_n * (t + 1), total_k) - 1].item() for t in tiles]
    for block in range(0, total_q, block_m):
        visiting = [t for t in tiles if starts[t] <= block < ends[t]]
        assert visiting == [*range(visiting[0], visiting[-1] + 1)] if visiting else True
        last = min(block + block_m, total_q) - 1
        seen = {key // block_n for q in (block, last) for key in range(schedule.key_start[q], schedule.key_end[q])}
        assert seen <= {*visiting}


def test_queries_go_document_by_document():
    lengths = [128, 512, 0, 300, 500, 60]  # the documents end at 128, 640, 640, 940, 1440 and 1500
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    schedule = causal_schedule(cu, 1552, torch.device("cpu"))
    # With tiles of 128 tokens, tile 7 has tokens of the documents with 300 and 500 tokens. Tile 11 has tokens of the
    # last two documents, and padding.
    assert schedule.query_tiles.tolist() == [4, 3, 2, 1, 11, 10, 9, 8, 7, 6, 5, 0, 12]
    # Tiles of 192 tokens: tile 0 has tokens of the first two documents, and tile 7 has tokens of the last two. Tile 3
    # has tokens of the documents with 512 and 300 tokens. Tile 4 has tokens of the documents with 300 and 500 tokens.
    assert schedule.wide_query_tiles.tolist() == [3, 2, 1, 0, 7, 6, 5, 4, 8]


def test_keys_go_document_by_document_from_the_first_key():
    cu = torch.tensor([0, 600, 2648, 3672], dtype=torch.int32)  # tile 4 has keys of the first two documents
    tiles = causal_schedule(cu, 3700, torch.device("cpu")).key_tiles
    assert tiles.tolist() == [*range(4, 21), *range(21, 29), *range(4)]


def test_keys_are_ordered_by_their_documents_queries():
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in ((128, 256), (2048, 1024)))
    tiles = build_schedule(cu_q, cu_k, 384, 3072, causal=False).key_tiles
    assert tiles.tolist() == [*range(16, 24), *range(16)]


def test_the_end_of_a_long_document_comes_first_whatever_follows_it():
    cu = torch.tensor([0, 3000, 3040, 3104], dtype=torch.int32)  # tile 23 has parts of all three documents
    assert causal_schedule(cu, 3104, torch.device("cpu")).query_tiles.tolist() == [*range(23, -1, -1), 24]


def test_queries_of_a_million_tokens_are_in_order():
    lengths = 3 * 2**18, 2**18  # the product of the numbers of tokens and tiles exceeds int32
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tiles = build_schedule(cu, cu, sum(lengths), sum(lengths), causal=True).query_tiles
    assert tiles.tolist() == [*range(6143, -1, -1), *range(8191, 6143, -1)]


def test_keys_of_short_documents_stay_in_the_order_of_the_stream():
    for length, in_order in ((SHORT_DOCUMENT - 1, True), (SHORT_DOCUMENT, False)):
        cu = torch.tensor([0, 128, 2 * length], dtype=torch.int32)  # `length` is the mean
        tiles = causal_schedule(cu, 2 * length, torch.device("cpu")).key_tiles
        assert sorted(tiles.tolist()) == list(range(-(-2 * length // 128)))
        assert (tiles.diff() == 1).all() == in_order


@pytest.mark.parametrize(
    ("lengths", "arguments", "length_class"),
    [
        ([LONG_DOCUMENT], {"causal": True}, "long"),
        ([LONG_DOCUMENT] * 2, {"causal": False}, "long"),
        ([LONG_DOCUMENT - 1], {"causal": True}, "medium"),
        ([2 * LONG_DOCUMENT, 8, 8], {"causal": True}, "medium"),
        ([2 * LONG_DOCUMENT, 8, 8], {"causal": True, "seqlen": 2 * LONG_DOCUMENT}, "long"),
        ([2 * LONG_DOCUMENT, 8, 8], {"causal": True, "seqlen": 2 * LONG_DOCUMENT, "window_size": (100, 0)}, "short"),
        ([VERY_LONG_DOCUMENT], {"causal": True}, "very_long"),
        ([VERY_LONG_DOCUMENT - 1], {"causal": True}, "long"),
        ([LONG_DOCUMENT], {"causal": True, "window_size": (1000, 0)}, "medium"),
        ([LONG_DOCUMENT], {"causal": True, "window_size": (100, 0)}, "short"),
        ([LONG_DOCUMENT], {"causal": False, "window_size": (1000, -1)}, "long"),
        ([SHORT_DOCUMENT + 1], {"causal": True}, "medium"),
        ([SHORT_DOCUMENT, 8], {"causal": True, "seqlen": SHORT_DOCUMENT}, "short"),
        ([SHORT_DOCUMENT, SHORT_DOCUMENT + 1], {"causal": True}, "short"),
    ],
)
def test_the_host_knows_the_length_of_documents(lengths, arguments, length_class):
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    schedule = build_schedule(cu, cu, total, total, **arguments)
    assert schedule.length_class == length_class
    again = Schedule.from_tensors(schedule.tensors(), schedule.crosses_documents, schedule.length_class)
    assert all(a is b for a, b in zip(again[:9], schedule[:9], strict=True))


@pytest.mark.parametrize(("cu", "expected"), [(None, True), ([0, 5], False)])
def test_one_document_is_known_from_the_call_alone(cu, expected):
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    assert causal_schedule(cu, 5, torch.device("cpu")).is_one_causal_document is expected


@pytest.mark.parametrize("cu", [[0, 5], [0, 3], [0, 2, 5]], ids=str)
def test_given_documents_may_end_before_the_tokens_do(cu):
    """NaN after the last document must not spread into that document. The host does not know where documents end."""
    cu = torch.tensor(cu, dtype=torch.int32)
    assert causal_schedule(cu, 5, CPU).crosses_documents
    assert build_schedule(cu, cu, 5, 5, causal=False).crosses_documents
    assert build_schedule(cu, cu, 5, 5, causal=False, padded=False).crosses_documents is (cu.numel() > 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_dense_documents_fill_the_tokens(batch):
    assert causal_schedule(None, 5, CPU).crosses_documents is False
    assert dense_schedule(batch, 5, 7, CPU, causal=True).crosses_documents is (batch > 1)


CALLS = st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 200), st.booleans(), st.integers(-1, 4))


@settings(max_examples=40, deadline=None)
@given(CALLS)
def test_dense_is_packed_with_equal_lengths(call):
    batch, m, n, causal, left = call
    dense = dense_schedule(batch, m, n, CPU, causal=causal, window_size=(left, 2))
    cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32) * length for length in (m, n))
    packed = build_schedule(cu_q, cu_k, batch * m, batch * n, causal=causal, window_size=(left, 2))
    assert all(torch.equal(a, b) for a, b in zip(dense.tensors(), packed.tensors(), strict=True))
    again = dense_schedule(batch, m, n, CPU, causal=causal, window_size=(left, 2))
    assert all(a is b for a, b in zip(dense.tensors(), again.tensors(), strict=True))


def is_kept(total):
    first, second = (causal_schedule(None, total, CPU) for _ in range(2))
    assert torch.equal(first.key_end, second.key_end)
    return first.key_end is second.key_end


def test_dense_schedules_are_kept_where_they_are_small():
    assert is_kept(300)
    assert is_kept(schedule_cache.MAX_TOKENS // 2)
    assert not is_kept(schedule_cache.MAX_TOKENS // 2 + 1)


def test_dense_calls_build_one_schedule(device, monkeypatch):
    built, build = [], schedules.build_schedule
    monkeypatch.setattr(schedules, "build_schedule", lambda *args, **kwargs: built.append(1) or build(*args, **kwargs))
    q, k, v = torch.randn(3, 2, 37, 1, 16, device=device)
    first, again = flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True)
    assert torch.equal(first, again)
    assert len(built) == 1
    assert not torch.equal(first, flash_attn_func(q, k, v, causal=False))


def test_schedules_for_tracing_are_not_kept():
    kept = causal_schedule(None, 310, CPU)
    with FakeTensorMode():
        fake = causal_schedule(None, 310, CPU)
        causal_schedule(None, 311, CPU)
    assert isinstance(fake.key_end, FakeTensor)
    assert causal_schedule(None, 310, CPU).key_end is kept.key_end
    assert not isinstance(causal_schedule(None, 311, CPU).key_end, FakeTensor)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "functionalize"])
def test_schedules_made_in_a_transform_are_not_kept(transform, device, monkeypatch):
    """Tensors that were created inside a functorch transform cannot be read after the transform."""
    monkeypatch.setattr(schedule_cache, "_CACHED", {})
    q = torch.randn(1, 20, 2, 16, device=device)
    x = torch.ones((), device=device)

    def scaled(x):
        return x * flash_attn_func(q, q, q, causal=True).sum()

    {
        "grad": lambda: torch.func.grad(scaled)(x),
        "vjp": lambda: torch.func.vjp(scaled, x),
        "jvp": lambda: torch.func.jvp(scaled, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(scaled)(x),
        "functionalize": lambda: torch.func.functionalize(scaled)(x),
    }[transform]()
    assert not schedule_cache._CACHED
    first = flash_attn_func(q, q, q, causal=True)
    assert len(schedule_cache._CACHED) == 1
    assert torch.equal(flash_attn_func(q, q, q, causal=True), first)


def test_schedules_made_in_inference_serve_training():
    with torch.inference_mode():
        causal_schedule(None, 320, CPU)
    x = torch.ones(320, requires_grad=True)
    (x * causal_schedule(None, 320, CPU).key_end).sum().backward()


def test_gpus_share_no_schedule(monkeypatch):
    """After set_device, `cuda` means another GPU. The default streams of both GPUs have the same handle, so the handle
    does not tell the GPUs apart.
    """
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_private, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(schedule_cache, "_CACHED", {})
    monkeypatch.setattr(schedules, "_build_dense_schedule", lambda *_: object())
    built = []
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        built.append(dense_schedule(1, 8, 8, torch.device("cuda"), causal=True))
    assert built[0] is not built[1] is dense_schedule(1, 8, 8, torch.device("cuda:1"), causal=True)


def test_another_stream_has_its_own_schedule(monkeypatch):
    """A schedule must not be read while another stream is still writing it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(schedule_cache, "_CACHED", {})
    monkeypatch.setattr(schedules, "_build_dense_schedule", lambda *_: object())
    of_streams = []
    for stream in (0, 7):
        monkeypatch.setattr(torch_private, "_raw_stream", lambda index, s=stream: s)
        of_streams.append(dense_schedule(1, 8, 8, torch.device("cuda:0"), causal=True))
    assert of_streams[0] is not of_streams[1]


def test_no_more_than_a_few_schedules_are_kept(monkeypatch):
    monkeypatch.setattr(schedule_cache, "_CACHED", {})
    lengths = range(1, schedule_cache.MAX_SCHEDULES + 2)
    built = [dense_schedule(1, n, n, CPU, causal=True) for n in lengths]
    kept = [*schedule_cache._CACHED.values()]
    assert all(a is b for a, b in zip(kept, built[1:], strict=True))


@pytest.mark.gpu
def test_a_captured_graph_keeps_its_own_schedule():
    device = torch.device("cuda")
    kept, graph = causal_schedule(None, 330, device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = causal_schedule(None, 330, device)
        unseen = causal_schedule(None, 331, device)
    assert captured.key_end is not kept.key_end
    assert causal_schedule(None, 331, device).key_end is not unseen.key_end


@pytest.mark.gpu
def test_streams_share_no_schedule():
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    kept = causal_schedule(None, 340, device)
    with torch.cuda.stream(stream):
        other = causal_schedule(None, 340, device)
        assert causal_schedule(None, 340, device).key_end is other.key_end
    assert other.key_end is not kept.key_end
