"""The Hopper kernels compile for sm_90 with no GPU: no serialised products, few spills, within shared memory."""

import pytest

from tests.kernels.aot.reports import compile_all

# head_dim-documents-dtype-outdtype-features -> bytes of spill stores allowed: what ptxas of triton 3.6 and 3.7 gives,
# with a little room. In the ten looked at (3.6), a loop over whole blocks stores none and reloads one register at most,
# one over masked blocks stores one at most. `marks` is what a batch of several documents takes.
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
SHARED = 227 * 1024  # bytes a program may take


# left to a machine with a GPU, which has the cores; but at 96 o of fp32 decides how many stages there is room for
SLOW = [case for case in SPILLS if "sinks" in case and not case.startswith(("128", "96-long"))]


def assert_within_limits(cases):
    for case, report in compile_all("tests.kernels.aot.hopper_forward", cases).items():
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["idle_barriers"] == [], report
        assert report["tensor_core"] == "HGMMA", report
        assert report["shared"] <= SHARED, report
        assert report["spill_bytes"] <= SPILLS[case], report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forward_compiles_within_limits():
    assert_within_limits([case for case in SPILLS if case not in SLOW])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_other_features_compile_within_limits():
    assert_within_limits(SLOW)
