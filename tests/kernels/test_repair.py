"""Where other kernels left NaN, the portable ones compute tiles again: those that are marked and no others."""

import pytest
import torch

from kernels.flash_attention.features import Features
from kernels.flash_attention.portable.bwd import attention_backward, write_backward
from kernels.flash_attention.portable.delta import attention_delta
from kernels.flash_attention.portable.fwd import attention_forward, write_forward
from kernels.flash_attention.schedule import causal_schedule

LENGTHS = [50, 0, 100, 41]
UNIT = 64  # rows that one mark is for


@pytest.fixture
def problem(device):
    total = sum(LENGTHS)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    q, k, v, do = (torch.randn(total, heads, 16, device=device) for heads in (4, 2, 2, 4))
    return q, k, v, do, causal_schedule(cu_seqlens, total, device), Features(0.25, 0.0, None, ())


def marks(heads, total, *units):
    """(heads, ceil(total / UNIT)) int32 with these (head, unit) marked."""
    spoiled = torch.zeros(heads, -(-total // UNIT), dtype=torch.int32)
    for head, unit in units:
        spoiled[head, unit] = 1
    return spoiled


def rows_of(spoiled, total):
    """(total, heads): which rows are marked."""
    return spoiled.repeat_interleave(UNIT, 1)[:, :total].T > 0


def test_forward_of_marked_tiles(problem, device):
    q, k, v, _, schedule, features = problem
    o, lse = attention_forward(q, k, v, schedule, features, torch.float32)
    spoiled = marks(4, len(q), (0, 0), (2, 2)).to(device)
    some, some_lse = torch.full_like(o, 7.0), torch.full_like(lse, 7.0)
    write_forward(q, k, v, some, some_lse, spoiled, schedule, features)
    marked = rows_of(spoiled, len(q))
    assert torch.equal(some[marked], o[marked]) and torch.equal(some_lse.T[marked], lse.T[marked])
    touched = (some != 7.0).any(2)
    # a tile may be of more rows than a mark, here of fewer
    assert touched[marked].all() and touched.sum() <= 2 * 128


def test_backward_of_marked_tiles(problem, device):
    q, k, v, do, schedule, features = problem
    o, lse = attention_forward(q, k, v, schedule, features, torch.float32)
    arguments = do, q, k, v, lse, attention_delta(o, do, None)
    exact = attention_backward(*arguments, schedule, features)
    some = [torch.full_like(x, 7.0) for x in exact]
    spoiled = marks(4, len(q), (3, 1)).to(device), marks(2, len(k), (1, 0), (1, 2)).to(device)
    write_backward(*arguments, *some, *spoiled, schedule, features)
    for ours, all_of_it, mark in zip(some, exact, (spoiled[0], spoiled[1], spoiled[1]), strict=True):
        marked = rows_of(mark, len(q))
        assert torch.equal(ours[marked], all_of_it[marked])
        assert (ours == 7.0).all(2).sum() >= ours.shape[0] * ours.shape[1] - 2 * 128


def test_nothing_is_marked(problem, device):
    q, k, v, _, schedule, features = problem
    o, lse = torch.full_like(q, 7.0), torch.full((4, len(q)), 7.0, device=device)
    write_forward(q, k, v, o, lse, marks(4, len(q)).to(device), schedule, features)
    assert (o == 7.0).all() and (lse == 7.0).all()
