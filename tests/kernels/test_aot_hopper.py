"""The Hopper kernels compile for sm_90 with no GPU: no serialised products, few spills, within shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# head_dim-documents-dtype-outdtype-features -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives,
# with a little room. At 64 and long about 15 a thread are in the loop over masked blocks; no others are in a loop over
# blocks. `marks` is what a batch of several documents takes.
SPILLS = {
    "64-long-bf16-bf16-plain": 448,
    "64-long-bf16-bf16-marks": 448,
    "64-long-fp16-fp32-sinks+softcap+marks": 448,
    "64-short-bf16-bf16-plain": 0,
    "64-short-bf16-bf16-marks": 0,
    "64-short-fp16-fp32-sinks+softcap+marks": 0,
    "96-short-bf16-bf16-plain": 64,
    "96-short-bf16-bf16-marks": 96,
    "96-short-fp16-fp32-sinks+softcap+marks": 64,
    "128-short-bf16-bf16-plain": 64,
    "128-short-bf16-bf16-marks": 64,
    "128-short-fp16-fp32-sinks+softcap+marks": 64,
    "256-long-bf16-bf16-plain": 64,
    "256-short-bf16-bf16-marks": 64,
    "256-short-fp16-fp16-sinks+softcap+marks": 64,
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
