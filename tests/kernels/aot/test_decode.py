"""The decoding kernels compile for each GPU within limits on registers and spills."""

import pytest

from fa_kernels.flash_attention.tiles import SHARED_LIMIT
from tests.kernels.aot.portable import table_of
from tests.kernels.aot.reports import compile_all

# {case: (registers per thread, bytes of spill stores, tensor-core instruction)}. A limit is the larger of the values
# for Triton 3.6 and 3.7, plus a margin. A tile for one query has 16 rows, too few for wgmma.
LIMITS = {
    "sm80-64-1-dense": (104, 0, "HMMA"),
    "sm80-128-1-dense": (248, 0, "HMMA"),
    "sm80-128-64-paged": (255, 176, "HMMA"),
    "sm80-256-4096-dense": (255, 80, "HMMA"),
    "sm89-128-1-dense": (248, 0, "HMMA"),
    "sm89-128-64-paged": (255, 224, "HMMA"),
    "sm89-256-4096-dense": (255, 128, "HMMA"),
    "sm90-64-1-dense": (168, 0, "HMMA"),
    "sm90-128-1-dense": (248, 0, "HMMA"),
    "sm90-64-64-paged": (216, 0, "HGMMA"),
    "sm90-96-64-paged": (255, 0, "HGMMA"),
    "sm90-128-64-paged": (255, 0, "HGMMA"),
    "sm90-256-4096-dense": (255, 0, "HGMMA"),
    "sm100-128-1-dense": (248, 0, "HMMA"),
    "sm100-128-64-paged": (255, 0, "UTCHMMA"),
    "sm100-256-4096-dense": (255, 160, "UTCHMMA"),
    "sm120-128-1-dense": (248, 0, "HMMA"),
    "sm120-128-64-paged": (255, 112, "HMMA"),
    "sm120-256-4096-dense": (255, 80, "HMMA"),
}
# `make test-oldest-triton` compiles only these cases, one for each kind of cache on sm80 and sm90
CORE = {"sm80-128-1-dense", "sm80-128-64-paged", "sm90-128-1-dense", "sm90-128-64-paged"}


@pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_within_limits(core):
    assert LIMITS.keys() >= CORE
    cases = [case for case in LIMITS if (case in CORE) == core]
    for case, report in compile_all("tests.kernels.aot.decode", cases).items():
        registers, spill_bytes, tensor_core = LIMITS[case]
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["registers"] <= registers, report
        assert report["spill_bytes"] <= spill_bytes, report
        assert report["tensor_core"] == tensor_core, report
        assert report["shared"] <= SHARED_LIMIT[table_of(case.partition("-")[0])], report
