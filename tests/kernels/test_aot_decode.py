"""The kernels of decoding compile within limits, as tests.kernels.aot_decode reports them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.flash_attention.tiles import SHARED_LIMIT

# registers a thread, bytes of spill stores, tensor-core instruction: the most that triton 3.6 and 3.7 need, with a
# little room. One query takes 16 rows, too few for Hopper's wgmma. "paged" has every feature, rotation among them.
LIMITS = {
    "sm80-64-1-dense": (104, 0, "HMMA"),
    "sm80-128-1-dense": (248, 0, "HMMA"),
    "sm80-128-64-paged": (255, 176, "HMMA"),
    "sm80-256-4096-dense": (255, 80, "HMMA"),
    "sm90-64-1-dense": (168, 0, "HMMA"),
    "sm90-128-1-dense": (248, 0, "HMMA"),
    "sm90-64-64-paged": (216, 0, "HGMMA"),
    "sm90-128-64-paged": (255, 0, "HGMMA"),
    "sm90-256-4096-dense": (255, 0, "HGMMA"),
}


@pytest.fixture(scope="module")
def reports():
    """By case, from a process of its own: what was imported for the interpreter stays so."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_decode", *LIMITS]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {report["case"]: report for report in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("case", LIMITS)
def test_compiles_within_limits(case, reports):
    (registers, spill_bytes, tensor_core), report = LIMITS[case], reports[case]
    assert report["warnings"] == []
    assert report["registers"] <= registers
    assert report["spill_bytes"] <= spill_bytes
    assert report["tensor_core"] == tensor_core
    assert report["shared"] <= SHARED_LIMIT[case.partition("-")[0]]
