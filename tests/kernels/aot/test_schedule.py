"""The kernel that builds attention schedules compiles within limits on registers and spills."""

import pytest

from tests.kernels.aot.reports import compile_all

LIMITS = {
    "sm80": 96,
    "sm89": 96,
    "sm90": 96,
    "sm100": 96,
    "sm120": 96,
}  # registers per thread that Triton 3.7 needs, plus a margin


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_within_limits():
    for arch, report in compile_all("tests.kernels.aot.schedule", [*LIMITS]).items():
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["registers"] <= LIMITS[arch] and report["spill_bytes"] == 0, report
        assert report["tensor_core"] == "none", report
