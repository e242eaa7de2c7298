"""Compiles the decoding kernels for each GPU, and checks that their registers and spills are within limits."""

import pytest

from fa_kernels.flash_attention.tiles import SHARED_LIMIT
from tests.kernels.aot.portable import table_of
from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import DECODE

# `make test-oldest-triton` compiles only the cases in CORE, one for each kind of cache on sm80 and sm90.
CORE = {"sm80-128-1-dense", "sm80-128-64-paged", "sm90-128-1-dense", "sm90-128-64-paged"}


@pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_within_limits(core):
    assert DECODE.keys() >= CORE
    cases = [case for case in DECODE if (case in CORE) == core]
    for case, report in compile_all("tests.kernels.aot.decode", cases).items():
        registers, spill_bytes, tensor_core = DECODE[case]
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["registers"] <= registers, report
        assert report["spill_bytes"] <= spill_bytes, report
        assert report["tensor_core"] == tensor_core, report
        assert report["shared"] <= SHARED_LIMIT[table_of(case.partition("-")[0])], report
