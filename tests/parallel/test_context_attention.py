"""Tests attention in a context group that has only one rank, so the rank gathers only its own keys."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fa_kernels.flash_attention import backend
from fa_train.models.attention import flash_attention, naive_attention
from fa_train.parallel.context.attention import ContextAttention, shared_schedule
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import register_group
from fa_train.parallel.context.traffic import traffic

TOTAL, BOUNDARIES = 40, np.array([0, 13, 40])


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    register_group("alone", dist.new_group([0]))
    yield "alone"
    dist.destroy_process_group()


def saved_rows(attention, group):
    """Returns a list with one entry for each tensor that is kept for the backward pass. The entry of a 3-D fp32 tensor
    is its number of rows. The entry of any other tensor is 0.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(TOTAL, n, 16, requires_grad=True) for n in (4, 2, 2))
    schedule = shared_schedule(traffic(deal(BOUNDARIES, TOTAL, 1), BOUNDARIES, 0, None), "short")
    rows = []

    def keep(x):
        rows.append(x.shape[0] if x.dtype == torch.float32 and x.dim() == 3 else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = ContextAttention(attention, group)(q, k, v, schedule)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    return rows


# conf/attention/flash.yaml makes a functools.partial of the function
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
    assert asked == [deterministic]


def test_sinks_and_slopes_may_have_any_stride(group):
    """Kernels assume that sinks and slopes are contiguous, so other tensors must be copied first."""
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    schedule = shared_schedule(traffic(deal(BOUNDARIES, TOTAL, 1), BOUNDARIES, 0, None), "short")
    outputs = []
    for stride in (1, 2):
        sinks, slopes = ((torch.arange(4.0) / n).repeat_interleave(stride)[::stride] for n in (2, 8))
        assert sinks.stride() == slopes.stride() == (stride,)
        attention = ContextAttention(flash_attention, group)
        outputs.append(attention(q, k, v, schedule, sinks=sinks, alibi_slopes=slopes))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        pytest.param(naive_attention, {"sinks": 4}, "sinks and alibi_slopes need attention=flash", id="sinks"),
        pytest.param(naive_attention, {"alibi_slopes": 4}, "sinks and alibi_slopes need attention=flash", id="alibi"),
        pytest.param(flash_attention, {"alibi_slopes": 3}, r"must be \(4,\) float32 on cpu; got \(3,\)", id="slopes"),
    ],
)
def test_impossible_sinks_and_slopes(attention, given, message, group):
    q, k, v = (torch.randn(TOTAL, n, 16) for n in (4, 2, 2))
    schedule = shared_schedule(traffic(deal(BOUNDARIES, TOTAL, 1), BOUNDARIES, 0, None), "short")
    inputs = {name: torch.zeros(size) for name, size in given.items()}
    with pytest.raises(ValueError, match=message):
        ContextAttention(attention, group)(q, k, v, schedule, **inputs)
