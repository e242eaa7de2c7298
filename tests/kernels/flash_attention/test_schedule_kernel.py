"""The kernel that builds attention schedules gives the same schedules as torch operators."""

from contextlib import contextmanager

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_kernels import flash_attn_varlen_func
from fa_kernels.flash_attention import interface, schedule_kernel
from fa_kernels.flash_attention import schedule as schedules
from fa_kernels.flash_attention.schedule import Schedule, tensors_by_torch
from fa_kernels.flash_attention.schedule_kernel import schedule_tensors
from tests.kernels.support.attention_check import DEVICE, cumulative

OF_GRADIENTS = ("query_start", "query_end", "key_tiles")


def require_equal(*documents, keys_in_order=False, gradients=True):
    """Requires that the kernel and torch operators build equal schedules.

    documents: cu_seqlens_q, cu_seqlens_k, total_q, total_k and the window.
    """
    wanted = tensors_by_torch(*documents, keys_in_order=keys_in_order)
    tiles = {"work_tile": schedules.WORK_TILE, "wide_tile": schedules.WIDE_TILE}
    found = schedule_tensors(*documents, keys_in_order=keys_in_order, gradients=gradients, **tiles)
    for name, x, y in zip(Schedule._fields, found, wanted, strict=False):
        assert x.dtype == y.dtype and x.device == y.device and x.data_ptr() % 16 == 0, name
        left_out = not gradients and name in OF_GRADIENTS
        assert x.numel() == 0 if left_out else torch.equal(x, y), (name, x, y)


@contextmanager
def small_blocks():
    """Reduces block sizes, so that even a few tokens need several programs.

    The reduced sizes also make each program compare its tiles with all tiles in several steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (schedules, "WORK_TILE", 4),
            (schedules, "WIDE_TILE", 6),
            (schedule_kernel, "TOKENS", 32),
            (schedule_kernel, "TILES", 4),
            (schedule_kernel, "OTHERS", 4),
            (schedule_kernel, "ALIGNMENT", 4),
        ):
            patch.setattr(module, name, value)
        schedule_kernel._layout.cache_clear()
        try:
            yield
        finally:
            schedule_kernel._layout.cache_clear()


LENGTHS = st.integers(0, 2) | st.integers(0, 20)
WINDOW = st.tuples(st.sampled_from((-1, 0, 1, 5)), st.sampled_from((-1, 0, 1, 5)))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(LENGTHS, LENGTHS), max_size=6), st.booleans(), WINDOW, st.integers(0, 9), st.data())
def test_any_documents_give_the_tensors_of_torch(pairs, one_side, window, tail, data):
    cu_q, cu_k = (cumulative([pair[i] for pair in pairs]) for i in range(2))
    cu_k = cu_q if one_side else cu_k
    totals = cu_q[-1].item() + tail, cu_k[-1].item() + data.draw(st.just(tail) | st.integers(0, 9))
    in_order, gradients = data.draw(st.booleans()), data.draw(st.booleans())
    with small_blocks():
        require_equal(cu_q, cu_k, *totals, window, keys_in_order=in_order, gradients=gradients)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), WINDOW, st.integers(1, 30), st.integers(1, 30))
def test_wrong_documents_reach_nothing_out_of_bounds(edges, window, total_q, total_k):
    cu = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    with small_blocks():
        found = schedule_tensors(
            cu, cu.flip(0).contiguous(), total_q, total_k, window,
            keys_in_order=False, gradients=True, work_tile=4, wide_tile=6,
        )  # fmt: skip
    schedule = Schedule(*found, "short", crosses_documents=True, is_one_causal_document=False)
    for name, total in (("key", total_k), ("query", total_q)):
        for ends in (getattr(schedule, f"{name}_start"), getattr(schedule, f"{name}_end")):
            assert ends.min() >= 0 and ends.max() <= total
    for tiles in (schedule.query_tiles, schedule.key_tiles, schedule.wide_query_tiles):
        assert tiles.sort().values.tolist() == [*range(tiles.numel())], "each tile is computed once"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([1, 0, 0] * 4000, id="many-documents"),
        pytest.param([1500, 40, 64, 1500, 0, 700], id="long-documents"),
        pytest.param([0], id="empty"),
        pytest.param([], id="none"),
    ],
)
def test_blocks_of_the_gpu_give_the_tensors_of_torch(lengths):
    cu = cumulative(lengths)
    total = sum(lengths) + 130
    require_equal(cu, cu, total, total, (-1, 0))


def test_cu_seqlens_need_not_be_aligned():
    cu = cumulative([7, 100, 3])
    shifted = torch.cat([cu[:1], cu])[1:]
    require_equal(shifted, shifted, 110, 110, (-1, 0))


def test_what_the_kernel_cannot_read_is_left_to_torch(monkeypatch):
    x = torch.zeros(4, dtype=torch.int32)
    assert not schedule_kernel.can_run(x, x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert schedule_kernel.can_run(x, x)
    for other in (x.long(), x[::2], torch.nn.Parameter(x, requires_grad=False)):
        assert not schedule_kernel.can_run(other, x) and not schedule_kernel.can_run(x, other)
    with FakeTensorMode():
        assert not schedule_kernel.can_run(x, x)
    inside = []
    torch.func.vmap(lambda y: (inside.append(schedule_kernel.can_run(x, x)), y)[1])(x)
    assert inside == [False]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not schedule_kernel.can_run(x, x)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_attention_is_the_same_with_the_kernels_schedule(gradients, monkeypatch):
    """The schedule of a call without gradients has only the tensors that a forward pass reads."""
    q, k, v = torch.randn(3, 50, 2, 16, device=DEVICE, requires_grad=gradients)
    cu = cumulative([20, 0, 27])
    call = lambda: flash_attn_varlen_func(q, k, v, cu, cu, 27, 27, causal=True)  # noqa: E731
    results = []
    for can_run in (False, True):
        monkeypatch.setattr(schedule_kernel, "can_run", lambda *_, can_run=can_run: can_run)
        o = call()
        results.append([o, *torch.autograd.grad(o.sum(), (q, k, v))] if gradients else [o])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    built = []
    build = interface.build_schedule
    monkeypatch.setattr(interface, "build_schedule", lambda *x, **y: built.append(build(*x, **y)) or built[-1])
    call()
    assert [getattr(built[0], name).numel() > 0 for name in OF_GRADIENTS] == [gradients] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("n_docs", [1, 2, 227, 20000])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (100, 0), (3, 50)], ids=str)
def test_the_gpu_gives_the_tensors_of_torch(n_docs, window):
    generator = torch.Generator().manual_seed(n_docs)
    lengths_q = (torch.rand(n_docs, generator=generator) ** 4 * 2**21 / n_docs).int().tolist()
    lengths_k = (torch.rand(n_docs, generator=generator) ** 4 * 2**20 / n_docs).int().tolist()
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    for in_order in (False, True):
        total_q, total_k = sum(lengths_q), sum(lengths_k)
        require_equal(cu_q, cu_q, total_q + 3, total_q + 3, window, keys_in_order=in_order)
        require_equal(cu_q, cu_k, total_q, total_k + 200, window, keys_in_order=in_order, gradients=in_order)


@pytest.mark.gpu
def test_fresh_documents_need_no_wait_and_no_compilation(monkeypatch):
    q, k, v = torch.randn(3, 2048, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    compiled = []
    batches = [cumulative([2048 // n] * n) for n in (16, 32, 64, 8, 128, 4, 256)]
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **call: compiled.append(call["fn"].name))
    try:
        for i, cu in enumerate(batches):
            if i == 3:  # the first calls compile kernels and record launches
                torch.cuda.set_sync_debug_mode("error")
                compiled.clear()
            flash_attn_varlen_func(q, k, v, cu, cu, 2048, 2048, causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled == []
