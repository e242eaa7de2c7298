"""The Hopper forward kernels compile without a GPU: no matmul is serialised, and spills and shared memory stay within
limits.
"""

import pytest

from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import FORWARD_SPILLS

# `make test-oldest-triton` compiles only the cases in CORE, one for each head_dim.
CORE = {
    "64-long-bf16-bf16-marks", "96-long-fp16-fp32-sinks+softcap+marks", "128-medium-fp16-fp32-sinks+softcap+marks",
    "256-long-bf16-bf16-marks",
}  # fmt: skip
SHARED = 227 * 1024  # bytes of shared memory that one program can use on an H100


# The cases in `SLOW` are compiled only on a machine with a GPU. The case 96-long-fp16-fp32-sinks+softcap+marks is not
# in `SLOW`, because it is the only case in which an fp32 output changes the number of pipeline stages.
SLOW = [case for case in FORWARD_SPILLS if "sinks" in case and not case.startswith(("128", "96-long"))]


def assert_within_limits(cases):
    for case, report in compile_all("tests.kernels.aot.hopper_forward", cases).items():
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["idle_barriers"] == [], report
        assert report["tensor_core"] == "HGMMA", report
        assert report["shared"] <= SHARED, report
        assert report["spill_bytes"] <= FORWARD_SPILLS[case], report


@pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forward_compiles_within_limits(core):
    here = [case for case in FORWARD_SPILLS if case not in SLOW]
    assert {*here} >= CORE
    assert_within_limits([case for case in here if (case in CORE) == core])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_other_features_compile_within_limits():
    assert_within_limits(SLOW)
