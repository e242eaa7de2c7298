"""Records a compile report for every entry of the tile table, for GPUs on which this project runs no tests.

    python -m tests.kernels.aot.entries    # compiles the missing and stale cases, and writes recorded/entries_*.json.

Compiling all cases takes half an hour on two cores. Each report in the record file includes a hash of the source of the
compiled kernel, so that a test can find stale reports without compiling.
"""

import json
import os
from pathlib import Path

import triton

from fa_kernels.flash_attention.tiles import _TILES, _TILES_OF_4_BYTES
from tests.kernels.aot.portable import table_of
from tests.kernels.aot.reports import RECORDED, ROOT, Reports, compile_in_processes, hashes_of

GPUS = ("sm80", "sm89", "sm100", "sm120")  # sm90 is left out, because `make gpu-check` runs the sm90 kernels on an H100
BATCH = 8 * (os.cpu_count() or 1)  # number of cases that are compiled between two writes of the record file


def all_cases() -> list[str]:
    """Returns the cases of every entry of the tile table.

    Each entry has a case for one document. Each entry for 2-byte dtypes also has a case for several documents.
    """
    cases = []
    for gpu in GPUS:
        of_4_bytes = "sm80" if gpu == "sm100" else table_of(gpu)  # as in tiles.tile_config
        for itemsize, table, used in ((2, _TILES, table_of(gpu)), (4, _TILES_OF_4_BYTES, of_4_bytes)):
            entries = [(head_dim, direction) for arch, head_dim, direction in table if arch == used]
            for kind in ("", "contain_") if itemsize == 2 else ("",):
                cases += [f"{gpu}-{d}-{d}-{kind}{direction}-{itemsize}" for d, direction in entries]
    return cases


def sources() -> dict[str, str]:
    """Returns {case: hash of the kernel's source code as it is now} for all cases."""
    return hashes_of({"portable": all_cases()})["portable"]


def record_file() -> Path:
    """Returns the path of the file that records the reports for the installed Triton version."""
    return RECORDED / f"entries_{triton.__version__}.json"


def read(file: Path) -> Reports:
    reports: Reports = json.loads(file.read_text())
    return reports


def write(file: Path, reports: Reports) -> None:
    """Writes each report on its own line, in the order of the cases."""
    lines = [f"{json.dumps(case)}: {json.dumps(reports[case])}" for case in all_cases() if case in reports]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compile_entries(cases: list[str], hashes: dict[str, str]) -> Reports:
    """Compiles `cases`, and returns the part of each compile report that the record file stores."""
    kept = ("registers", "spill_bytes", "warnings", "tensor_core", "tensor_memory", "shared")
    return {
        case: {"source": hashes[case]} | {name: report[name] for name in kept}
        for case, report in compile_in_processes("tests.kernels.aot.portable", cases).items()
    }


def record() -> None:
    """Compiles the cases whose report is missing or stale, and records their reports."""
    file, hashes = record_file(), sources()
    reports = read(file) if file.exists() else {}
    reports = {case: report for case, report in reports.items() if report["source"] == hashes.get(case)}
    missing = [case for case in hashes if case not in reports]
    for first in range(0, len(missing), BATCH):
        reports |= compile_entries(missing[first : first + BATCH], hashes)
        write(file, reports)
        print(f"{min(first + BATCH, len(missing))} of {len(missing)} compiled", flush=True)
    write(file, reports)
    print(file.relative_to(ROOT))


if __name__ == "__main__":
    record()
