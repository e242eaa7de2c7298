"""Runs every compiled variant of every kernel on a GPU, and compares the results with torch's (python -m
tests.gpu_check).

The portable kernels run with the tile sizes of every GPU in the tables. The portable kernels also run with smaller tile
sizes, which `fit` finds for GPUs with less shared memory. Tests on a CPU never run compiled machine code, so a change
of a kernel is finished only after `make gpu-check` has passed on a GPU.
"""

import argparse
import os
import sys
import time

import torch
import triton

from scripts.bench.timing import require_gpu
from tests.gpu_check.cases import Case, all_cases
from tests.gpu_check.workers import run_all


def part_of(cases: list[Case], part: str) -> list[Case]:
    """Returns part "i/n" of the cases: case i, and every n-th case after it.

    Raises: ValueError if `part` is not of the form "i/n".
    """
    index, slash, count = part.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--part must be i/n with 1 <= i <= n; got {part}")
    return cases[int(index) - 1 :: int(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th case, starting with the i-th")
    parser.add_argument("--only", default="", help="run the cases whose names contain this text")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that share the GPU")
    parser.add_argument("--list", action="store_true", help="print the names of the cases without running them")
    arguments = parser.parse_args()
    require_gpu("tests.gpu_check")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        cases = part_of([case for case in all_cases(device) if arguments.only in case.name], arguments.part)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return
    began = time.monotonic()
    kernels: set[str] = set()
    failures = []
    for done, result in enumerate(run_all(cases, arguments.jobs), 1):
        kernels |= result.kernels
        if result.error:
            failures.append(result)
            print(f"FAILED {result.case.name}: {result.error}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(cases)} cases after {time.monotonic() - began:.0f} s", flush=True)
    versions = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}"
    print(
        f"gpu-check, part {arguments.part}: {len(cases) - len(failures)} of {len(cases)} cases passed, "
        f"{len(kernels)} kernels, {time.monotonic() - began:.0f} s with {arguments.jobs} processes ({versions})"
    )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
