"""Runs the modules that compile kernels for a GPU which is not there, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def compile_all(module: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `module` reports, a line of JSON for each case in order.

    As many processes share the cases as each worker of pytest-xdist has cores, so that one test compiles each kernel
    once; and not the tests' own: what was imported for the interpreter stays so.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = Path(__file__).parents[2]
    cores = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    n_parts = min(max(cores, 1), len(cases))
    parts = [cases[first::n_parts] for first in range(n_parts)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *part],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    reports: dict[str, dict[str, Any]] = {}
    for process, part in zip(processes, parts, strict=True):
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        reports |= dict(zip(part, map(json.loads, out.splitlines()), strict=True))
    return reports
