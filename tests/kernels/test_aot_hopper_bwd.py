"""The Hopper backward kernels compile without a GPU: on wgmma, in shared memory, within limits on spills, no C75xx.

And what head_dim 256 reads beside Q and dO, and which calls take the kernels where gradients must be repeatable.
"""

import pytest
import torch

from kernels.flash_attention import backend
from kernels.flash_attention.features import Features
from kernels.flash_attention.hopper import bwd, bwd_wide
from kernels.flash_attention.portable import bwd as portable_bwd
from kernels.flash_attention.schedule import causal_schedule
from tests.kernels.ahead_of_time import compile_all

# dtype-head_dim-group-softcap-marks -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives, with room
SPILLS = {
    "bf16-128-1-0-0": 96, "bf16-64-1-0-0": 144,
    "bf16-128-1-0-1": 96, "bf16-64-1-0-1": 144, "bf16-96-1-0-1": 32,
    "fp16-128-4-0-1": 96, "fp16-64-4-0-1": 176,
    "bf16-128-1-1-1": 368, "bf16-64-4-1-1": 1152, "bf16-96-4-1-1": 128,
    "bf16-256dkdv-1-0-0": 32, "bf16-256dkdv-4-1-1": 32,
    "bf16-256dq-1-0-0": 384, "bf16-256dq-4-1-1": 384,
}  # fmt: skip
SHARED = 227 * 1024  # bytes that a program may take on an H100


@pytest.mark.timeout(600)
def test_compiles_within_limits():
    for case, report in compile_all("tests.kernels.aot_hopper_bwd", [*SPILLS]).items():
        assert report["warnings"] == [], (case, report)  # C7512 and the like say that ptxas has serialised the matmuls
        assert report["tensor_core"] == "HGMMA", (case, report)
        assert report["shared"] <= SHARED, (case, report)
        assert report["spill_bytes"] <= SPILLS[case], (case, report)


@pytest.mark.parametrize("total", [pytest.param(128, id="whole-blocks"), pytest.param(70, id="ragged")])
def test_rows_of_wide_heads_are_whole_blocks(device, total):
    lse, delta = torch.randn(2, 3, total, device=device)
    lse[1, 5] = float("-inf")
    rows = bwd_wide._prepare(lse, delta)
    assert rows.shape == (2, 3, 128)
    log2_lse = lse * 1.4426950408889634
    log2_lse[1, 5] = float("inf")  # sees no key: 2^(score - inf) is 0
    assert rows[0, :, :total].equal(log2_lse) and rows[1, :, :total].equal(delta)
    assert (rows[0, :, total:] == float("inf")).all() and not rows[1, :, total:].any()


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "taken"),
    [
        pytest.param(128, False, "hopper", id="sums-in-memory"),
        pytest.param(128, True, "portable", id="sums-in-memory-deterministic"),
        pytest.param(256, False, "hopper", id="one-owner"),
        pytest.param(256, True, "hopper", id="one-owner-deterministic"),
    ],
)
def test_deterministic_takes_hopper_where_that_is_repeatable(monkeypatch, head_dim, deterministic, taken):
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    monkeypatch.setattr(bwd, "supports", lambda *_: True)
    monkeypatch.setattr(bwd, "attention_backward", lambda *_: "hopper")
    monkeypatch.setattr(portable_bwd, "attention_backward", lambda *_: "portable")
    do, q, k, v = torch.empty(4, 3, 2, head_dim)
    row_values = torch.empty(2, 3)
    schedule, features = causal_schedule(None, 3, q.device), Features(1.0, 0.0, None, [])
    assert backend.backward(do, q, k, v, row_values, row_values, schedule, features, deterministic) == taken
    monkeypatch.setenv(backend.VARIABLE, "portable")
    assert backend.backward(do, q, k, v, row_values, row_values, schedule, features, deterministic) == "portable"
