"""The fused backward launches one program per item, or fewer programs that take items from a queue."""

from types import SimpleNamespace

import pytest
import torch

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import fused
from fa_kernels.flash_attention.hopper.primitives import queue
from fa_kernels.flash_attention.schedule import causal_schedule

MULTIPROCESSORS = 4


@pytest.mark.parametrize(
    ("head_dim", "programs"),
    [
        pytest.param(64, MULTIPROCESSORS, id="queue"),
        pytest.param(128, 8 * 2, id="a-program-for-each-of-8-tiles-and-2-kv-heads"),
    ],
)
def test_every_item_is_computed(head_dim, programs, monkeypatch):
    grids = []
    for module in (fused, queue):
        monkeypatch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(queue, "_zero", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(fused, "launch", lambda kernel, grid, *arguments, **constants: grids.append(grid))
    q, do = (torch.zeros(1024, 4, head_dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(1024, 2, head_dim, dtype=torch.bfloat16) for _ in range(2))
    schedule = causal_schedule(torch.tensor([0, 300, 1024], dtype=torch.int32), 1024, q.device)
    prepared = fused.Prepared(torch.zeros(2, 4, 1024), None, torch.zeros(4, 1024, head_dim), None)
    features = Features(1.0, softcap=0.0, sinks=None, alibi=())
    fused.gradients_of_keys(do, q, k, v, prepared, None, schedule, features)
    assert grids == [(programs,)]
