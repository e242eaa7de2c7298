"""The Hopper kernels compile for sm_90 with no GPU: no serialised products, few spills, within shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# head_dim-dtype-outdtype-features -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives, with a
# little room. None is in a loop over blocks.
SPILLS = {
    "64-bf16-bf16-plain": 32,
    "128-bf16-bf16-plain": 64,
    "64-fp16-fp32-sinks+softcap": 0,
    "128-fp16-fp32-sinks+softcap": 64,
}
SHARED = 227 * 1024  # bytes a program may take


@pytest.mark.parametrize("case", SPILLS)
def test_forward_compiles_within_limits(case):
    # in a process of its own: a kernel that was imported under the interpreter cannot be compiled
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_hopper", case]
    result = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["warnings"] == [], report
    assert report["tensor_core"] == "HGMMA", report
    assert report["shared"] <= SHARED, report
    assert report["spill_bytes"] <= SPILLS[case], report
