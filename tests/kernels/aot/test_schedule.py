"""The kernel that builds attention schedules compiles within limits on registers and spills."""

import pytest

from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import SCHEDULE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_within_limits():
    for arch, report in compile_all("tests.kernels.aot.schedule", [*SCHEDULE]).items():
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["registers"] <= SCHEDULE[arch] and report["spill_bytes"] == 0, report
        assert report["tensor_core"] == "none", report
