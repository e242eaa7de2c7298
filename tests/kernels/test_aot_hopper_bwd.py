"""The Hopper backward kernel compiles without a GPU: on wgmma, in shared memory, within limits on spills, no C75xx."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# dtype-head_dim-group-softcap-marks -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives, with room
SPILLS = {
    "bf16-128-1-0-0": 96, "bf16-64-1-0-0": 144, "bf16-96-1-0-0": 32,
    "bf16-128-1-0-1": 96, "bf16-64-1-0-1": 144, "bf16-96-1-0-1": 32,
    "fp16-128-4-0-1": 96, "fp16-64-4-0-1": 176, "fp16-96-4-0-1": 32,
    "bf16-128-1-1-1": 368, "bf16-64-4-1-1": 1152, "bf16-96-4-1-1": 128,
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
