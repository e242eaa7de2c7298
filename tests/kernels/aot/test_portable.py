"""The entries of the tile table compile for their GPU within limits on registers, spills and shared memory.

test_entries.py checks the recorded reports of every entry for sm80, sm89, sm100 and sm120 against the limits in this
file. This file compiles the entries for sm90, and some entries for sm80 and sm100.
"""

import pytest

from fa_kernels.flash_attention.tiles import _TILES, _TILES_OF_4_BYTES, SHARED_LIMIT
from tests.kernels.aot.reports import compile_all

# {(arch, head_dim, pass): (registers per thread, bytes of spill stores, tensor-core instruction)} for one document. A
# limit is the larger of the values for Triton 3.6 and 3.7, plus a margin.
LIMITS = {
    ("sm80", 64, "fwd"): (255, 16, "HMMA"),
    ("sm80", 64, "dkdv"): (255, 16, "HMMA"),
    ("sm80", 64, "dq"): (255, 48, "HMMA"),
    ("sm80", 96, "fwd"): (255, 0, "HMMA"),
    ("sm80", 96, "dkdv"): (255, 512, "HMMA"),
    ("sm80", 96, "dq"): (192, 16, "HMMA"),
    ("sm80", 128, "fwd"): (255, 32, "HMMA"),
    ("sm80", 128, "dkdv"): (255, 32, "HMMA"),
    ("sm80", 128, "dq"): (248, 0, "HMMA"),
    ("sm80", 192, "fwd"): (255, 96, "HMMA"),
    ("sm80", 192, "dkdv"): (255, 0, "HMMA"),
    ("sm80", 192, "dq"): (255, 32, "HMMA"),
    ("sm80", 256, "fwd"): (255, 64, "HMMA"),
    ("sm80", 256, "dkdv"): (255, 32, "HMMA"),
    ("sm80", 256, "dq"): (255, 0, "HMMA"),
    ("sm90", 64, "fwd"): (168, 0, "HGMMA"),
    ("sm90", 64, "dkdv"): (255, 0, "HGMMA"),
    ("sm90", 64, "dq"): (168, 0, "HGMMA"),
    ("sm90", 96, "fwd"): (208, 0, "HGMMA"),
    ("sm90", 96, "dkdv"): (255, 176, "HGMMA"),
    ("sm90", 96, "dq"): (192, 0, "HGMMA"),
    ("sm90", 128, "fwd"): (255, 0, "HGMMA"),
    ("sm90", 128, "dkdv"): (255, 128, "HGMMA"),
    ("sm90", 128, "dq"): (248, 0, "HGMMA"),
    ("sm90", 192, "fwd"): (255, 0, "HGMMA"),
    ("sm90", 192, "dkdv"): (255, 320, "HGMMA"),
    ("sm90", 192, "dq"): (248, 0, "HGMMA"),
    ("sm90", 256, "fwd"): (255, 80, "HGMMA"),
    ("sm90", 256, "dk"): (255, 16, "HGMMA"),
    ("sm90", 256, "dv"): (255, 32, "HGMMA"),
    ("sm90", 256, "dq"): (255, 0, "HGMMA"),
    ("sm100", 64, "fwd"): (176, 0, "UTCHMMA"),
    ("sm100", 64, "dkdv"): (255, 0, "UTCHMMA"),
    ("sm100", 64, "dq"): (176, 0, "UTCHMMA"),
    ("sm100", 96, "fwd"): (208, 0, "UTCHMMA"),
    ("sm100", 96, "dkdv"): (255, 192, "UTCHMMA"),
    ("sm100", 96, "dq"): (192, 0, "UTCHMMA"),
    ("sm100", 128, "fwd"): (216, 0, "UTCHMMA"),
    ("sm100", 128, "dkdv"): (255, 256, "UTCHMMA"),
    ("sm100", 128, "dq"): (184, 0, "UTCHMMA"),
    ("sm100", 192, "fwd"): (248, 0, "UTCHMMA"),
    ("sm100", 192, "dkdv"): (232, 0, "UTCHMMA"),
    ("sm100", 192, "dq"): (176, 0, "UTCHMMA"),
    ("sm100", 256, "fwd"): (255, 32, "UTCHMMA"),
    ("sm100", 256, "dk"): (255, 256, "UTCHMMA"),
    ("sm100", 256, "dv"): (255, 96, "UTCHMMA"),
    ("sm100", 256, "dq"): (208, 0, "UTCHMMA"),
}
CONTAINING = {
    (64, "contain_fwd"): (168, 0, "HGMMA"),
    (64, "contain_dkdv"): (255, 0, "HGMMA"),
    (64, "contain_dq"): (152, 0, "HGMMA"),
    (96, "contain_fwd"): (208, 0, "HGMMA"),
    (96, "contain_dkdv"): (255, 256, "HGMMA"),
    (96, "contain_dq"): (192, 0, "HGMMA"),
    (128, "contain_fwd"): (255, 0, "HGMMA"),
    (128, "contain_dkdv"): (255, 320, "HGMMA"),
    (128, "contain_dq"): (248, 0, "HGMMA"),
    (192, "contain_fwd"): (255, 0, "HGMMA"),
    (192, "contain_dkdv"): (255, 800, "HGMMA"),
    (192, "contain_dq"): (255, 16, "HGMMA"),
    (256, "contain_fwd"): (255, 32, "HGMMA"),
    (256, "contain_dk"): (255, 64, "HGMMA"),
    (256, "contain_dv"): (255, 128, "HGMMA"),
    (256, "contain_dq"): (255, 0, "HGMMA"),
}
# Limits, as in `LIMITS`, for the kernels that repair tiles after Hopper's kernels. With these limits, two programs fit
# on a multiprocessor, except for the backward with head_dim 256.
REPAIRS = {
    (64, "repair_fwd"): (144, 0, "HGMMA"),
    (64, "repair_bwd"): (255, 0, "HGMMA"),
    (96, "repair_fwd"): (216, 0, "HGMMA"),
    (96, "repair_bwd"): (255, 128, "HGMMA"),
    (128, "repair_fwd"): (255, 0, "HGMMA"),
    (128, "repair_bwd"): (255, 160, "HGMMA"),
    (256, "repair_fwd"): (255, 96, "HGMMA"),
    (256, "repair_bwd"): (255, 928, "HGMMA"),
}
# {(arch, head_dim, pass): (bytes of spill stores, tensor-core instruction)} of fp32 kernels with three TF32 matmuls per
# product. Registers have no limit here. If a tile has fewer than 64 rows, the instruction is HMMA on every GPU.
OF_4_BYTES = {
    ("sm80", 64, "fwd"): (32, "HMMA"),
    ("sm80", 64, "dkdv"): (80, "HMMA"),
    ("sm80", 64, "dq"): (0, "HMMA"),
    ("sm80", 96, "fwd"): (128, "HMMA"),
    ("sm80", 96, "dkdv"): (0, "HMMA"),
    ("sm80", 96, "dq"): (64, "HMMA"),
    ("sm80", 128, "fwd"): (32, "HMMA"),
    ("sm80", 128, "dkdv"): (352, "HMMA"),
    ("sm80", 128, "dq"): (96, "HMMA"),
    ("sm80", 192, "fwd"): (48, "HMMA"),
    ("sm80", 192, "dkdv"): (16, "HMMA"),
    ("sm80", 192, "dq"): (0, "HMMA"),
    ("sm80", 256, "fwd"): (16, "HMMA"),
    ("sm80", 256, "dkdv"): (704, "HMMA"),
    ("sm80", 256, "dq"): (160, "HMMA"),
    ("sm90", 64, "fwd"): (32, "HGMMA"),
    ("sm90", 64, "dkdv"): (144, "HGMMA"),
    ("sm90", 64, "dq"): (0, "HGMMA"),
    ("sm90", 96, "fwd"): (368, "HGMMA"),
    ("sm90", 96, "dkdv"): (784, "HGMMA"),
    ("sm90", 96, "dq"): (80, "HGMMA"),
    ("sm90", 128, "fwd"): (736, "HGMMA"),
    ("sm90", 128, "dkdv"): (1984, "HMMA"),
    ("sm90", 128, "dq"): (144, "HMMA"),
    ("sm90", 192, "fwd"): (96, "HMMA"),
    ("sm90", 192, "dkdv"): (1568, "HMMA"),
    ("sm90", 192, "dq"): (720, "HMMA"),
    ("sm90", 256, "fwd"): (256, "HMMA"),
    ("sm90", 256, "dkdv"): (720, "HMMA"),
    ("sm90", 256, "dq"): (576, "HMMA"),
    ("sm100", 64, "fwd"): (64, "UTCHMMA"),
    ("sm100", 64, "dkdv"): (0, "HMMA"),
    ("sm100", 64, "dq"): (0, "HMMA"),
    ("sm100", 96, "fwd"): (992, "UTCHMMA"),
    ("sm100", 96, "dkdv"): (0, "HMMA"),
    ("sm100", 96, "dq"): (144, "HMMA"),
    ("sm100", 128, "fwd"): (176, "HMMA"),
    ("sm100", 128, "dkdv"): (272, "HMMA"),
    ("sm100", 128, "dq"): (144, "HMMA"),
    ("sm100", 192, "fwd"): (176, "HMMA"),
    ("sm100", 192, "dkdv"): (0, "HMMA"),
    ("sm100", 192, "dq"): (48, "HMMA"),
    ("sm100", 256, "fwd"): (96, "HMMA"),
    ("sm100", 256, "dkdv"): (912, "HMMA"),
    ("sm100", 256, "dq"): (288, "HMMA"),
}
# ptxas serialises the matmuls of the dkdv kernel for head_dim 192 on sm90, and warns about it. The tile size of this
# kernel is nevertheless the fastest on an H200.
SERIALISED = {"sm90-192-192-dkdv-2": {"C7512"}}
TENSOR_MEMORY = 512  # columns, on sm100
# Largest allowed ratio of shared_bytes to the shared memory that Triton reports. shared_bytes assumes the largest
# layout that the compiler can choose.
SURPLUS = {"sm80": 1.25, "sm90": 1.1, "sm100": 1.25}
# cases with other dtypes, or with values whose head_dim differs from that of the keys
UNUSUAL = (
    *("sm90-256-192-dk-2", "sm90-192-128-dkdv-2", "sm80-128-128-dkdv-4"),
    *("sm90-128-128-fwd-1", "sm90-80-80-fwd-1", "sm90-16-16-fwd-1"),
)
MODULE = "tests.kernels.aot.portable"
# Without a GPU, the tests compile kernels of one head_dim for sm80 and sm100, and some kernels for sm90. The lists
# whose names start with `SLOW` have the other kernels for sm90, which only a machine with a GPU compiles.
SLOW_CONTAINING = [entry for entry in CONTAINING if entry[0] in (96, 192)]
HERE_HEAD_DIMS = {"sm80": {128}, "sm90": {head_dim for head_dim, _ in SLOW_CONTAINING}, "sm100": {128}}
HERE = [entry for entry in LIMITS if entry[1] in HERE_HEAD_DIMS[entry[0]] and (entry[0] != "sm100" or "fwd" in entry)]
SLOW = [entry for entry in LIMITS if entry[0] == "sm90" and entry not in HERE]
SLOW_REPAIRS = [entry for entry in REPAIRS if entry[0] < 128]
HERE_OF_4_BYTES = [("sm90", 64, "dkdv"), ("sm90", 64, "dq")]
SLOW_OF_4_BYTES = [entry for entry in OF_4_BYTES if entry[0] == "sm90" and entry not in HERE_OF_4_BYTES]

# `make test-oldest-triton` compiles only these cases, with one head_dim for each architecture and kernel
CORE_HEAD_DIMS = {"sm80": 128, "sm90": 96, "sm100": 128}
CORE_CONTAINING = CORE_REPAIRS = 128
CORE_UNUSUAL = {"sm90-192-128-dkdv-2", "sm90-128-128-fwd-1"}
CORE_OR_REST = pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])


def case_of(arch, head_dim, direction, itemsize=2):
    return f"{arch}-{head_dim}-{head_dim}-{direction}-{itemsize}"


def assert_within_limits(limits):
    """limits: a dictionary from a case to its limits on registers, spill bytes and the tensor-core instruction."""
    reports = compile_all(MODULE, [*limits])
    failures = []
    for case, (registers, spill_bytes, tensor_core) in limits.items():
        arch, report = case.partition("-")[0], reports[case]
        within = {
            "ptxas warns of serialised products": set(report["warnings"]) <= SERIALISED.get(case, set()),
            "descriptors": report["misplaced_descriptors"] == [],
            "registers": report["registers"] <= registers,
            "spills": report["spill_bytes"] <= spill_bytes,
            "tensor core": report["tensor_core"] == tensor_core,
            "tensor memory": report["tensor_memory"] <= TENSOR_MEMORY,
            "shared memory": report["shared"] <= SHARED_LIMIT[arch],
            "shared_bytes": report["shared"] <= report["shared_computed"] <= SURPLUS[arch] * report["shared"],
        }
        failures += [f"{name}: {report}, limits {limits[case]}" for name, fits in within.items() if not fits]
    assert not failures, "\n".join(failures)


def test_every_entry_has_limits():
    """If there are entries dk and dv, `LIMITS` has no entry dkdv, because only the repair kernels use that entry."""
    apart = {(arch, d, "dkdv") for arch, d, direction in _TILES if direction == "dk"}
    assert set(LIMITS) == set(_TILES) - apart
    assert set(OF_4_BYTES) == set(_TILES_OF_4_BYTES) | {("sm100", *entry[1:]) for entry in _TILES_OF_4_BYTES}
    containing = {("sm90", d, direction.removeprefix("contain_")) for d, direction in CONTAINING}
    assert containing == {entry for entry in LIMITS if entry[0] == "sm90"}


@CORE_OR_REST
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_compile_within_limits(core):
    entries = [entry for entry in HERE if (entry[1] == CORE_HEAD_DIMS[entry[0]]) == core]
    assert_within_limits({case_of(*entry): LIMITS[entry] for entry in entries})


@CORE_OR_REST
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_that_contain_nan_compile_within_limits(core):
    entries = [entry for entry in CONTAINING if entry not in SLOW_CONTAINING and (entry[0] == CORE_CONTAINING) == core]
    assert_within_limits({case_of("sm90", *entry): CONTAINING[entry] for entry in entries})


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
        assert report["shared"] <= report["shared_computed"] <= SHARED_LIMIT[arch], (case, report)
        if direction != "fwd":  # in the forward pass, shared_bytes also covers the decoding kernel
            assert report["shared_computed"] <= 1.6 * report["shared"], (case, report)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entries_of_4_bytes_compile_within_limits():
    assert_4_bytes_within_limits(HERE_OF_4_BYTES)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_entries_that_compile_slowly_are_within_limits():
    several = {case_of("sm90", *entry): CONTAINING[entry] for entry in SLOW_CONTAINING}
    assert_within_limits({case_of(*entry): LIMITS[entry] for entry in SLOW} | several)
    assert_repairs_within_limits(SLOW_REPAIRS)
    assert_4_bytes_within_limits(SLOW_OF_4_BYTES)


@CORE_OR_REST
@pytest.mark.slow
def test_shared_bytes_of_other_dtypes_and_of_unequal_head_dims(core):
    assert {*UNUSUAL} >= CORE_UNUSUAL
    for case, report in compile_all(MODULE, [case for case in UNUSUAL if (case in CORE_UNUSUAL) == core]).items():
        assert report["shared"] <= report["shared_computed"] <= 1.25 * report["shared"], (case, report)
