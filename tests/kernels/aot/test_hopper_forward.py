"""The Hopper forward kernels compile without a GPU: no matmul is serialised, and spills and shared memory stay within
limits.
"""

import pytest

from tests.kernels.aot.reports import compile_all

# {head_dim-length_class-dtype-out_dtype-features: allowed bytes of spill stores}. A limit is the larger of the values
# for Triton 3.6 and 3.7, plus a margin. Cases with `marks` are for several documents.
SPILLS = {
    "64-long-bf16-bf16-plain": 16,
    "64-long-bf16-bf16-marks": 16,
    "64-long-fp16-fp32-sinks+softcap+marks": 32,
    "64-medium-bf16-bf16-plain": 8,
    "64-medium-fp16-fp32-sinks+softcap+marks": 8,
    "64-short-bf16-bf16-marks": 8,
    "64-short-fp16-fp32-sinks+softcap+marks": 8,
    "96-short-bf16-bf16-marks": 8,
    "96-long-bf16-bf16-marks": 8,
    "96-long-fp16-fp32-sinks+softcap+marks": 8,
    "96-very_long-bf16-bf16-marks": 8,
    "96-medium-bf16-bf16-marks": 8,
    "96-medium-fp16-fp32-sinks+softcap+marks": 8,
    "128-medium-bf16-bf16-plain": 8,
    "128-medium-bf16-bf16-marks": 24,
    "128-medium-fp16-fp32-sinks+softcap+marks": 32,
    "128-short-bf16-bf16-marks": 16,
    "128-short-fp16-fp32-sinks+softcap+marks": 8,
    "128-very_long-bf16-bf16-plain": 8,
    "256-short-bf16-bf16-marks": 32,
    "256-medium-bf16-bf16-marks": 16,
    "256-long-bf16-bf16-plain": 56,
    "256-long-bf16-bf16-marks": 56,
    "256-long-fp16-fp16-sinks+softcap+marks": 56,
}
# one case per head_dim: `make test-oldest-triton` compiles only these cases
CORE = {
    "64-long-bf16-bf16-marks", "96-long-fp16-fp32-sinks+softcap+marks", "128-medium-fp16-fp32-sinks+softcap+marks",
    "256-long-bf16-bf16-marks",
}  # fmt: skip
SHARED = 227 * 1024  # bytes of shared memory that one program can use


# The cases in `SLOW` are compiled only on a machine with a GPU. The case 96-long with sinks is compiled everywhere,
# because its fp32 output changes the number of pipeline stages.
SLOW = [case for case in SPILLS if "sinks" in case and not case.startswith(("128", "96-long"))]


def assert_within_limits(cases):
    for case, report in compile_all("tests.kernels.aot.hopper_forward", cases).items():
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["idle_barriers"] == [], report
        assert report["tensor_core"] == "HGMMA", report
        assert report["shared"] <= SHARED, report
        assert report["spill_bytes"] <= SPILLS[case], report


@pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forward_compiles_within_limits(core):
    here = [case for case in SPILLS if case not in SLOW]
    assert {*here} >= CORE
    assert_within_limits([case for case in here if (case in CORE) == core])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_other_features_compile_within_limits():
    assert_within_limits(SLOW)
