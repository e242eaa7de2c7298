"""The entries of the tile table compile for their GPU within limits on registers, spills and shared memory.

test_entries.py checks recorded reports of ptxas against the same limits, for all entries for sm80, sm89, sm100 and
sm120.
"""

import pytest

from fa_kernels.flash_attention.tiles import _TILES, _TILES_OF_4_BYTES, SHARED_LIMIT
from tests.kernels.aot.portable import computed_shared_bytes
from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import (
    ISOLATING,
    OF_4_BYTES,
    PORTABLE,
    REPAIRS,
    SURPLUS,
    TENSOR_MEMORY,
    UNUSUAL,
    case_of,
)

# ptxas serialises the matmuls of the dkdv kernel for head_dim 192 on sm90, and prints a warning. On an H200, no other
# tile size of this kernel is faster.
SERIALISED = {"sm90-192-192-dkdv-2": {"C7512"}}
MODULE = "tests.kernels.aot.portable"
# Without a GPU, the tests compile kernels of one head_dim for sm80 and sm100, and some kernels for sm90. Only a machine
# with a GPU compiles the remaining kernels for sm90, which are in the lists whose names start with `SLOW`.
SLOW_ISOLATING = [entry for entry in ISOLATING if entry[0] in (96, 192)]
HERE_HEAD_DIMS = {"sm80": {128}, "sm90": {head_dim for head_dim, _ in SLOW_ISOLATING}, "sm100": {128}}
HERE = [entry for entry in PORTABLE if entry[1] in HERE_HEAD_DIMS[entry[0]] and (entry[0] != "sm100" or "fwd" in entry)]
SLOW = [entry for entry in PORTABLE if entry[0] == "sm90" and entry not in HERE]
SLOW_REPAIRS = [entry for entry in REPAIRS if entry[0] < 128]
HERE_OF_4_BYTES = [("sm90", 64, "dkdv"), ("sm90", 64, "dq")]
SLOW_OF_4_BYTES = [entry for entry in OF_4_BYTES if entry[0] == "sm90" and entry not in HERE_OF_4_BYTES]

# `make test-oldest-triton` compiles only the `CORE` cases, with one head_dim for each architecture and kernel.
CORE_HEAD_DIMS = {"sm80": 128, "sm90": 96, "sm100": 128}
CORE_ISOLATING = CORE_REPAIRS = 128
CORE_UNUSUAL = {"sm90-192-128-dkdv-2", "sm90-128-128-fwd-1"}
CORE_OR_REST = pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])


def assert_within_limits(limits):
    """limits: {case: (limit on registers, limit on spill bytes, expected tensor-core instruction)}."""
    reports = compile_all(MODULE, [*limits])
    failures = []
    for case, (registers, spill_bytes, tensor_core) in limits.items():
        arch, report, computed = case.partition("-")[0], reports[case], computed_shared_bytes(case)
        within = {
            "ptxas warns of serialised products": set(report["warnings"]) <= SERIALISED.get(case, set()),
            "descriptors": report["misplaced_descriptors"] == [],
            "registers": report["registers"] <= registers,
            "spills": report["spill_bytes"] <= spill_bytes,
            "tensor core": report["tensor_core"] == tensor_core,
            "tensor memory": report["tensor_memory"] <= TENSOR_MEMORY,
            "shared memory": report["shared"] <= SHARED_LIMIT[arch],
            "shared_bytes": report["shared"] <= computed <= SURPLUS[arch] * report["shared"],
        }
        failures += [f"{name}: {report}, limits {limits[case]}" for name, fits in within.items() if not fits]
    assert not failures, "\n".join(failures)


def test_every_entry_has_limits():
    apart = {(arch, d, "dkdv") for arch, d, direction in _TILES if direction == "dk"}
    assert set(PORTABLE) == set(_TILES) - apart
    assert set(OF_4_BYTES) == set(_TILES_OF_4_BYTES) | {("sm100", *entry[1:]) for entry in _TILES_OF_4_BYTES}
    isolating = {("sm90", d, direction.removeprefix("contain_")) for d, direction in ISOLATING}
    assert isolating == {entry for entry in PORTABLE if entry[0] == "sm90"}


@CORE_OR_REST
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_compile_within_limits(core):
    entries = [entry for entry in HERE if (entry[1] == CORE_HEAD_DIMS[entry[0]]) == core]
    assert_within_limits({case_of(*entry): PORTABLE[entry] for entry in entries})


@CORE_OR_REST
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_that_isolate_nan_compile_within_limits(core):
    entries = [entry for entry in ISOLATING if entry not in SLOW_ISOLATING and (entry[0] == CORE_ISOLATING) == core]
    assert_within_limits({case_of("sm90", *entry): ISOLATING[entry] for entry in entries})


def assert_repairs_within_limits(entries):
    for case, report in compile_all(MODULE, [case_of("sm90", *entry) for entry in entries]).items():
        _, head_dim, _, direction, _ = case.split("-")
        registers, spill_bytes, tensor_core = REPAIRS[int(head_dim), direction]
        assert report["warnings"] == report["misplaced_descriptors"] == [], report
        assert report["registers"] <= registers and report["spill_bytes"] <= spill_bytes, report
        assert report["tensor_core"] == tensor_core, report
        programs = 1 if (head_dim, direction) == ("256", "repair_bwd") else 2
        assert report["shared"] <= SHARED_LIMIT["sm90"] // programs, report


@CORE_OR_REST
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_repairs_compile_within_limits(core):
    entries = [entry for entry in REPAIRS if entry not in SLOW_REPAIRS and (entry[0] == CORE_REPAIRS) == core]
    assert_repairs_within_limits(entries)


def assert_4_bytes_within_limits(entries):
    for case, report in compile_all(MODULE, [case_of(*entry, itemsize=4) for entry in entries]).items():
        arch, head_dim, _, direction, _ = case.split("-")
        spill_bytes, tensor_core = OF_4_BYTES[arch, int(head_dim), direction]
        assert report["misplaced_descriptors"] == [], (case, report)
        assert report["spill_bytes"] <= spill_bytes, (case, report)
        assert report["tensor_core"] == tensor_core, (case, report)
        assert report["tensor_memory"] <= TENSOR_MEMORY, (case, report)
        computed = computed_shared_bytes(case)
        assert report["shared"] <= computed <= SHARED_LIMIT[arch], (case, report, computed)
        if direction != "fwd":  # for `fwd`, `computed` also counts memory that only decoding kernels use
            assert computed <= 1.6 * report["shared"], (case, report, computed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_of_4_bytes_compile_within_limits():
    assert_4_bytes_within_limits(HERE_OF_4_BYTES)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_entries_that_compile_slowly_are_within_limits():
    several = {case_of("sm90", *entry): ISOLATING[entry] for entry in SLOW_ISOLATING}
    assert_within_limits({case_of(*entry): PORTABLE[entry] for entry in SLOW} | several)
    assert_repairs_within_limits(SLOW_REPAIRS)
    assert_4_bytes_within_limits(SLOW_OF_4_BYTES)


@CORE_OR_REST
@pytest.mark.slow
def test_shared_bytes_covers_other_dtypes_and_unequal_head_dims(core):
    assert {*UNUSUAL} >= CORE_UNUSUAL
    for case, report in compile_all(MODULE, [case for case in UNUSUAL if (case in CORE_UNUSUAL) == core]).items():
        computed = computed_shared_bytes(case)
        assert report["shared"] <= computed <= 1.25 * report["shared"], (case, report, computed)
