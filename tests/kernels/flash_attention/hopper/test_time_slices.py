"""The Hopper kernels give the same results if the GPU switches to another process in the middle of a kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fa_kernels.flash_attention.hopper.backward import choose as bwd
from tests.kernels.flash_attention.hopper.support.hopper import NEEDS_SM_90

pytestmark = NEEDS_SM_90


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_time_slices_change_nothing(dtype):
    """Each forward or backward pass takes some milliseconds, about as long as a time slice of the GPU.

    Under MPS the test shows nothing, because MPS runs processes concurrently instead of in time slices.
    """
    cases = [(str(head_dim), dtype, softcap) for head_dim in bwd.HEAD_DIMS for softcap in ("0", "30")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.flash_attention.hopper.support.time_sliced", *case],
            cwd=Path(__file__).parents[4],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for case in cases
    ]
    try:
        for case, process in zip(cases, processes, strict=True):
            assert process.stdout.readline() == "ready\n", case
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for case, process in zip(cases, processes, strict=True):
            out, _ = process.communicate()
            assert process.returncode == 0, case
            for name, counts in json.loads(out).items():
                assert counts["right"] > 0 and counts["wrong"] == 0, (case, name, counts)
    finally:
        for process in processes:
            process.kill()
            process.wait()
