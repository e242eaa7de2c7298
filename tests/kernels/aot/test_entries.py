"""For sm80, sm89, sm100 and sm120, every tile table entry has a recorded report that is fresh and within limits.

`make aot-reports` compiles entries whose report is missing or stale.
"""

import subprocess
import sys

import pytest

from fa_kernels.flash_attention.tiles import _TILES, _TILES_OF_4_BYTES, SHARED_LIMIT
from tests.kernels.aot import entries
from tests.kernels.aot.portable import computed_shared_bytes, pass_of, table_of
from tests.kernels.aot.reports import RECORDED, ROOT, environment
from tests.kernels.aot.support.limits import OF_4_BYTES, PORTABLE, SURPLUS, TENSOR_MEMORY

RECORDS = sorted(RECORDED.glob("entries_*.json"))
# {GPU: bytes of spill stores that are allowed in addition to a limit in `PORTABLE`}. Kernels for several documents need
# more registers than the kernels in `PORTABLE`. The kernels of sm120 are compiled by another version of ptxas.
MORE_SPILLS = {"sm80": 0, "sm89": 48, "sm100": 0, "sm120": 288}
UNUSED = {("sm100", 256, "dkdv"): (255, 48, "HMMA")}  # on sm100 with head_dim 256, dK and dV have separate kernels
COMPILED_AGAIN = ("sm80-64-64-dq-2", "sm89-64-64-fwd-2", "sm100-64-64-fwd-2", "sm120-64-64-dq-2")
CHANGED = """
from fa_kernels.flash_attention.portable.columns import load_columns
from tests.kernels.aot.sources import source_hash
code = load_columns.src
for text in (code, code + "    # a comment\\n", code + "    x = 1\\n"):
    load_columns._unsafe_update_src(text)
    print(source_hash("portable:sm80-64-64-fwd-2"))
for case in ("sm89-64-64-fwd-2", "sm80-64-64-contain_fwd-2", "sm80-64-64-dq-2"):
    print(source_hash(f"portable:{case}"))
"""

# Prints the name of each function, class and constant that a kernel's source hash covers, such as Ring or BLOCK_N.
NAMED = """
from tests.kernels.aot.sources import parts_of
print(*[name for place in parts_of("hopper_backward:bf16-128-1-0-0")[2] for name in place.split()], sep="\\n")
"""


@pytest.fixture(scope="module")
def sources():
    return entries.sources()


def test_the_cases_are_every_entry_for_every_gpu():
    cases = [case.split("-") for case in entries.all_cases()]
    tables = [(gpu, "sm80", "sm80") for gpu in ("sm80", "sm89", "sm120")]
    for gpu, used, of_4_bytes in [*tables, ("sm100", "sm100", "sm80")]:
        for itemsize, table, arch in ((2, _TILES, used), (4, _TILES_OF_4_BYTES, of_4_bytes)):
            found = {(int(d), p) for name, d, _, p, size in cases if (name, size) == (gpu, str(itemsize))}
            listed = {(d, p) for name, d, p in table if name == arch}
            several = {(d, f"contain_{p}") for d, p in listed} if itemsize == 2 else set()
            assert listed and found == listed | several
    assert {case[0] for case in cases} == {"sm80", "sm89", "sm100", "sm120"}


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_the_record_is_complete_and_fresh(file, sources):
    found = {case: report["source"] for case, report in entries.read(file).items()}
    stale = [case for case in sources if case in found and found[case] != sources[case]]
    missing, unknown = [case for case in sources if case not in found], [case for case in found if case not in sources]
    assert not stale and not missing and not unknown, (
        f"run `make aot-reports`: in {file.name}, {stale=}, {missing=}, {unknown=}"
    )


def problems(case, report):
    gpu, head_dim, _, direction, itemsize = case.split("-")
    head_dim, itemsize, direction = int(head_dim), int(itemsize), pass_of(direction)
    entry = (table_of(gpu), head_dim, direction)
    spill_bytes, tensor_core = OF_4_BYTES[entry] if itemsize == 4 else (PORTABLE | UNUSED)[entry][1:]
    computed = computed_shared_bytes(case)
    surplus = SURPLUS[table_of(gpu)] if itemsize == 2 else 1.6
    within = {
        "warnings": report["warnings"] == [],
        "spills": report["spill_bytes"] <= spill_bytes + MORE_SPILLS[gpu],
        "tensor core": report["tensor_core"] == tensor_core,
        "tensor memory": report["tensor_memory"] <= TENSOR_MEMORY,
        "shared memory": report["shared"] <= computed <= SHARED_LIMIT[table_of(gpu)],
        # for fp32, shared_bytes of the forward pass includes the memory that the decoding kernel needs
        "shared_bytes": computed <= surplus * report["shared"] or (itemsize, direction) == (4, "fwd"),
    }
    return [f"{case}: {name}, {report}, {computed=}, {spill_bytes=}" for name, fits in within.items() if not fits]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_every_recorded_report_is_within_limits(file):
    found = [problem for case, report in entries.read(file).items() for problem in problems(case, report)]
    assert RECORDS and not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_again_gives_the_recorded_reports(sources):
    reports = entries.compile_entries([*COMPILED_AGAIN], sources)
    assert {case.partition("-")[0] for case in reports} == {*entries.GPUS}
    assert not [problem for case, report in reports.items() for problem in problems(case, report)]
    if (file := entries.record_file()) not in RECORDS:  # torch can bring a version of Triton that has no record yet
        pytest.skip(f"{file.name} does not exist; `make aot-reports` makes it")
    assert reports == {case: entries.read(file)[case] for case in reports}


@pytest.mark.slow
def test_code_of_a_called_function_changes_the_hash_and_comments_do_not():
    command = [sys.executable, "-c", CHANGED]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, with_comment, with_code, *others = run.stdout.split()
    assert first == with_comment and len({first, with_code, *others}) == 5


@pytest.mark.slow
def test_the_hash_covers_functions_classes_and_constants():
    run = subprocess.run([sys.executable, "-c", NAMED], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = {line.removeprefix("fa_kernels.flash_attention.hopper.") for line in run.stdout.split()}
    of_triton = {"backward.fused._bwd_kernel", "backward.items.produce", "primitives.ring.Ring"}
    of_the_host = {
        "backward.fused_config.FusedConfig",
        "primitives.registers.accumulator_layout",
        "primitives.registers._asm",
    }
    assert names >= of_triton | of_the_host | {"BLOCK_N", "DRAWN_BEFORE"}
