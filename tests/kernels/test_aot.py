"""Every entry of the tile table compiles for its GPU, within limits on spills, on tensor cores, in shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# (head_dim, pass) -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives, with a little room
SPILLS = {
    "sm90": {
        (64, "fwd"): 0, (64, "dkdv"): 0, (64, "dq"): 0,
        (96, "fwd"): 0, (96, "dkdv"): 192, (96, "dq"): 0,
        (128, "fwd"): 0, (128, "dkdv"): 128, (128, "dq"): 0,
        (256, "fwd"): 96, (256, "dkdv"): 256, (256, "dq"): 0,
    },
    "sm80": {
        (64, "fwd"): 16, (64, "dkdv"): 0, (64, "dq"): 32,
        (96, "fwd"): 0, (96, "dkdv"): 32, (96, "dq"): 0,
        (128, "fwd"): 16, (128, "dkdv"): 16, (128, "dq"): 0,
        (256, "fwd"): 48, (256, "dkdv"): 48, (256, "dq"): 0,
    },
}  # fmt: skip
# bytes a program may take: of an H100's, and of the smallest Ampere's (sm_86), which uses the sm_80 entries
SHARED = {"sm90": 227 * 1024, "sm80": 99 * 1024}
TENSOR_CORE = {"sm90": "HGMMA", "sm80": "HMMA"}


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_tile_table_compiles_within_limits(arch):
    cases = list(SPILLS[arch])
    # a kernel imported under the interpreter cannot be compiled, so this runs in a process of its own
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", *(f"{arch}-{d}-{direction}" for d, direction in cases)]
    result = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    for case, report in zip(cases, reports, strict=True):
        assert report["warnings"] == [], (case, report)
        assert report["tensor_core"] == TENSOR_CORE[arch], (case, report)
        assert report["shared"] <= SHARED[arch], (case, report)
        assert report["spill_bytes"] <= SPILLS[arch][case], (case, report)
