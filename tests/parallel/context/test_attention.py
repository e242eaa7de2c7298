"""Tests attention in a context group that has only one rank, so the rank gathers only its own keys."""

import time
import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.models.attention import flash_attention, naive_attention
from fa_train.parallel.context import attention_operators, operators
from fa_train.parallel.context.attention import ContextAttention, shared_schedule
from fa_train.parallel.context.attention_operators import context_forward, overlaps
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import register_group, start_gathering
from fa_train.parallel.context.traffic import Counts, traffic

TOTAL, BOUNDARIES = 40, np.array([0, 13, 40])


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    register_group("alone", dist.new_group([0]))
    yield "alone"
    dist.destroy_process_group()


def planned(exchanges=True, may_split=True):
    """Returns the schedule of the only rank.

    exchanges: whether the schedule says that ranks exchange rows. A single rank needs no rows of other ranks.
    """
    plan = traffic(deal(BOUNDARIES, TOTAL, 1), BOUNDARIES, 0, None, may_split=may_split)
    counts = Counts(*plan.counts)
    assert counts.exchanges == (not may_split)
    return shared_schedule(plan._replace(counts=[*counts._replace(exchanges=int(exchanges))]), "short")


def saved_rows(attention, group, may_split=True):
    """Returns a list of row counts, with one count for each tensor that attention keeps for the backward pass.

    If a tensor is not 3-D or not fp32, its count is 0.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2))
    schedule = planned(may_split=may_split)
    rows = []

    def keep(x):
        rows.append(x.shape[0] if x.dtype == torch.float32 and x.dim() == 3 else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = ContextAttention(attention, group)(q, k, v, schedule)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    return rows


# conf/attention/flash.yaml makes a functools.partial of flash_attention
@pytest.mark.slow
@pytest.mark.parametrize("attention", [flash_attention, partial(flash_attention)], ids=["function", "partial"])
def test_flash_attention_keeps_no_gathered_keys(attention, group):
    assert max(saved_rows(attention, group)) == TOTAL


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_are_deterministic_if_torch_is(deterministic, group, monkeypatch):
    asked, backward = [], backend.backward

    def recorded(*arguments):
        asked.append(arguments[-1])
        return backward(*arguments)

    monkeypatch.setattr(backend, "backward", recorded)
    torch.use_deterministic_algorithms(deterministic)
    try:
        saved_rows(flash_attention, group)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == 2 * [deterministic], "one run over own keys, and one over the buffer"


def test_sinks_and_slopes_may_have_any_stride(group):
    """Kernels assume contiguous sinks and slopes, so ContextAttention must copy those that are not contiguous."""
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    schedule = planned()
    outputs = []
    for stride in (1, 2):
        sinks, slopes = ((torch.arange(4.0) / n).repeat_interleave(stride)[::stride] for n in (2, 8))
        assert sinks.stride() == slopes.stride() == (stride,)
        attention = ContextAttention(flash_attention, group)
        outputs.append(attention(q, k, v, schedule, sinks=sinks, alibi_slopes=slopes))
    assert torch.equal(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("features", [False, True], ids=["plain", "sinks and slopes"])
def test_groups_of_heads_give_the_same_results(features, group):
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2))
    schedule = planned()
    sinks, slopes = torch.linspace(-1, 1, 4).requires_grad_(), torch.linspace(0.1, 0.5, 4)
    given = {"sinks": sinks, "alibi_slopes": slopes} if features else {}
    inputs = (q, k, v, sinks) if features else (q, k, v)
    results = []
    for head_groups in (1, 2):
        o = ContextAttention(flash_attention, group, head_groups)(q, k, v, schedule, **given)
        results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_one_group_of_heads_is_gathered_at_a_time(group, monkeypatch):
    heads, gathered = [], attention_operators.gathered

    def recorded(xs, *arguments):
        heads.append([x.shape[1] for x in xs])
        return gathered(xs, *arguments)

    monkeypatch.setattr(attention_operators, "gathered", recorded)
    q, k, v = (torch.randn(TOTAL, n, 16, requires_grad=True) for n in (8, 4, 4))
    schedule = planned()
    ContextAttention(flash_attention, group, 2)(q, k, v, schedule).sum().backward()
    assert heads == [[2, 2]] * 4, "two groups in the forward, and two in the backward"


@pytest.mark.slow
@pytest.mark.parametrize("may_split", [True, False], ids=["two runs", "one run"])
def test_sent_and_received_rows_are_freed_before_attention_over_gathered_keys(may_split, group, monkeypatch):
    # Each pass with two runs, and each backward, makes one call during the exchange and one after it.
    expected = [2, 0, 2, 0] if may_split else [0, 2, 0]
    exchanged, alive = [], []

    def count():
        return sum(x() is not None for x in exchanged)

    def recorded(xs, moves, name):
        exchange = start_gathering(xs, moves, name)
        exchanged[:] = [weakref.ref(x) for x in (exchange.leaving, exchange.parts[0])]
        return exchange

    def counting(run):
        def counted(*arguments):
            # gloo's thread can hold the tensors for some milliseconds after wait() has returned.
            deadline = time.monotonic() + 10
            while count() > expected[len(alive)] and time.monotonic() < deadline:
                time.sleep(0.001)
            alive.append(count())
            return run(*arguments)

        return counted

    for module in (operators, attention_operators):
        monkeypatch.setattr(module, "start_gathering", recorded)
    for name in ("forward", "backward", "prepare_backward", "gradients_of_keys"):
        monkeypatch.setattr(backend, name, counting(getattr(backend, name)))
    saved_rows(flash_attention, group, may_split)
    assert alive == expected


@pytest.mark.parametrize(
    ("attention", "message"),
    [(flash_attention, "divide the 2 KV heads; got 3"), (naive_attention, "need attention=flash")],
)
def test_impossible_groups_of_heads(attention, message, group):
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    schedule = planned()
    with pytest.raises(ValueError, match=message):
        ContextAttention(attention, group, 3)(q, k, v, schedule)


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        pytest.param(
            naive_attention, {"sinks": 4}, "sinks, alibi_slopes and head_groups need attention=flash", id="sinks"
        ),
        pytest.param(
            naive_attention, {"alibi_slopes": 4}, "sinks, alibi_slopes and head_groups need attention=flash", id="alibi"
        ),
        pytest.param(flash_attention, {"alibi_slopes": 3}, r"must be \(4,\) float32 on cpu; got \(3,\)", id="slopes"),
    ],
)
def test_impossible_sinks_and_slopes(attention, given, message, group):
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    schedule = planned()
    inputs = {name: torch.zeros(size) for name, size in given.items()}
    with pytest.raises(ValueError, match=message):
        ContextAttention(attention, group)(q, k, v, schedule, **inputs)


@pytest.mark.parametrize("attention", [flash_attention, naive_attention])
def test_a_schedule_without_traffic_is_refused(attention, group):
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    alone = causal_schedule(None, TOTAL, q.device)
    with pytest.raises(ValueError, match=r"needs the traffic of the batch, .*; got a Schedule without traffic"):
        ContextAttention(attention, group)(q, k, v, alone)


def test_a_softcap_that_is_too_large_is_refused(group):
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    with pytest.raises(ValueError, match=r"softcap must be finite and at most 1000, .*; got 2000.0"):
        ContextAttention(flash_attention, group)(q, k, v, planned(), softcap=2000.0)


@pytest.mark.parametrize("head_groups", [1, 2])
def test_nothing_is_exchanged_if_no_rank_needs_keys(head_groups, group, monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2)]
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    results, heads = [], []
    backward = backend.backward

    def recorded(do, dlse, q, *arguments):
        heads.append(q.shape[1])
        return backward(do, dlse, q, *arguments)

    for exchanges in (True, False):
        if not exchanges:
            monkeypatch.setattr(dist, "all_to_all_single", None)
            monkeypatch.setattr(backend, "backward", recorded)
        attention = ContextAttention(flash_attention, group, head_groups)
        o = attention(*inputs, planned(exchanges), sinks=sinks, alibi_slopes=torch.linspace(0.1, 0.5, 4))
        results.append([o, *torch.autograd.grad(o.square().sum(), [*inputs, sinks])])
    torch.testing.assert_close(*results)
    assert heads == [4 // head_groups] * head_groups, "one group at a time, as the memory plan assumes"


def test_a_watched_call_runs_operators_and_an_eager_call_runs_none(group):
    schedule = planned()
    leaves = [torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2)]
    attend = partial(ContextAttention(flash_attention, group), schedule=schedule)
    run = []
    for watching in (nullcontext(), FlopCounterMode(display=False)):
        with watching, patch.object(attention_operators, "context_forward", wraps=context_forward) as forward:
            o = attend(*leaves)
            run.append((forward.call_count, o.detach(), *torch.autograd.grad(o.sum(), leaves)))
    assert [calls for calls, *_ in run] == [0, 1]
    for direct, watched in zip(run[0][1:], run[1][1:], strict=True):
        assert torch.equal(direct, watched)


def test_second_derivatives_are_refused(group):
    schedule = planned()
    leaves = [torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2)]
    o = ContextAttention(flash_attention, group)(*leaves, schedule)
    gradients = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(gradients[0].sum(), leaves)


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        pytest.param([4096], 2, (True, False), id="one document"),
        pytest.param([4096], 8, (False, False), id="one document, many ranks"),
        pytest.param([1000, 1100, 996, 1000], 2, (True, True), id="documents"),
    ],
)
def test_kernels_run_during_exchanges_if_memory_allows_it(lengths, ranks, expected):
    """The memory plan counts gathered keys and values, and their gradients, for one document that fills the stream."""
    boundaries, rank = np.cumsum([0, *lengths]), ranks - 1
    plan = traffic(deal(boundaries, sum(lengths), ranks), boundaries, rank, None, may_split=False)
    moves, counts = shared_schedule(plan, "short").moves, Counts(*plan.counts)
    assert overlaps(moves, counts) == expected
    capacity, exchanged = len(plan.taken), sum(map(sum, plan.sizes))
    for allowed, held in zip(expected, (counts.rows, 2 * counts.rows), strict=True):
        assert allowed == (held + exchanged <= 2 * capacity)


@pytest.mark.parametrize("during", [(False, False), (True, False), (True, True)])
def test_the_order_of_kernels_and_exchanges(during, group, monkeypatch):
    events = []

    def noted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: events.append(name) or function(*arguments))

    monkeypatch.setattr(attention_operators, "overlaps", lambda *_: during)
    q, k, v = (torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2))
    o = ContextAttention(flash_attention, group)(q, k, v, planned(may_split=False))
    for name in ("backward", "prepare_backward", "gradients_of_keys", "gradient_of_queries"):
        noted(backend, name)
    for name in ("start_gathering", "receive", "start_returning", "finish_returning", "summed_gradients"):
        noted(attention_operators, name)
    torch.autograd.grad(o.sum(), (q, k, v))
    assert events == {
        (False, False): ["start_gathering", "receive", "backward", "summed_gradients"],
        (True, False): [
            "start_gathering", "prepare_backward", "receive", "gradients_of_keys", "gradient_of_queries",
            "start_returning", "finish_returning",
        ],
        (True, True): [
            "start_gathering", "prepare_backward", "receive", "gradients_of_keys", "start_returning",
            "gradient_of_queries", "finish_returning",
        ],
    }[during]  # fmt: skip
