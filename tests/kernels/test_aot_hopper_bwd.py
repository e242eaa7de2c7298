"""The Hopper backward kernels compile without a GPU: on wgmma, in shared memory, within limits on spills, no C75xx.

And what head_dim 256 sums dQ in comes out as rows and columns.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.flash_attention.hopper import bwd_wide
from kernels.flash_attention.portable.launch import new_marks

# dtype-head_dim-group-softcap-marks -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives, with room
SPILLS = {
    "bf16-128-1-0-0": 96, "bf16-64-1-0-0": 144, "bf16-96-1-0-0": 32,
    "bf16-128-1-0-1": 96, "bf16-64-1-0-1": 144, "bf16-96-1-0-1": 32,
    "fp16-128-4-0-1": 96, "fp16-64-4-0-1": 176, "fp16-96-4-0-1": 32,
    "bf16-128-1-1-1": 368, "bf16-64-4-1-1": 1152, "bf16-96-4-1-1": 128,
    "bf16-256-1-0-0": 208, "fp16-256-4-0-1": 160, "bf16-256-4-1-1": 304,
    "bf16-256tma-1-0-0": 272, "fp16-256tma-4-0-1": 240, "bf16-256tma-4-1-1": 352,
    "bf16-256dkdv-1-0-0": 32, "fp16-256dkdv-4-0-1": 32, "bf16-256dkdv-4-1-1": 32,
    "bf16-256dq-1-0-0": 384, "fp16-256dq-4-0-1": 384, "bf16-256dq-4-1-1": 384,
}  # fmt: skip
SHARED = 227 * 1024  # bytes that a program may take on an H100


@pytest.fixture(scope="module")
def reports():
    # a kernel imported under the interpreter cannot be compiled, so this runs in a process of its own
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_hopper_bwd", *SPILLS]
    folder = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return dict(zip(SPILLS, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", SPILLS)
def test_compiles_within_limits(reports, case):
    report = reports[case]
    # C7512 and the like say that ptxas has serialised the matmuls
    assert report["warnings"] == []
    assert report["tensor_core"] == "HGMMA"
    assert report["shared"] <= SHARED
    assert report["spill_bytes"] <= SPILLS[case]


@pytest.mark.parametrize("total", [pytest.param(128, id="whole-blocks"), pytest.param(70, id="ragged")])
def test_sum_of_dq_becomes_rows(device, total):
    n_heads, head_dim = 2, bwd_wide.HEAD_DIM
    exact = torch.randn(n_heads, 128, head_dim, device=device)
    rows, columns = torch.arange(64, device=device)[:, None], torch.arange(head_dim, device=device)
    places = bwd_wide._place_in_block.fn(rows, columns).flatten()
    assert places.sort().values.equal(torch.arange(64 * head_dim, device=device))
    dq_sum = torch.empty(n_heads, 2, 64 * head_dim, device=device)
    dq_sum[:, :, places] = exact.view(n_heads, 2, -1)
    like = torch.empty(total, n_heads, head_dim, device=device)
    marks = new_marks(n_heads, total, device)
    assert bwd_wide._finish(dq_sum, 0.5, marks, like).equal(0.5 * exact.transpose(0, 1)[:total])
    assert not marks.any()
    dq_sum[1, 1, places[3 * head_dim + 200]] = float("nan")
    assert bwd_wide._finish(dq_sum, 0.5, marks, like)[64 + 3, 1, 200].isnan()
    assert marks.tolist() == [[0, 0], [0, 1]]
