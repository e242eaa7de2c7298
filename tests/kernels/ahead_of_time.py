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

    Two processes share the cases, so that one test compiles each kernel once; and not the tests' own: what was imported
    for the interpreter stays so.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = Path(__file__).parents[2]
    halves = cases[::2], cases[1::2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *half],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in halves
    ]
    reports: dict[str, dict[str, Any]] = {}
    for process, half in zip(processes, halves, strict=True):
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        reports |= dict(zip(half, map(json.loads, out.splitlines()), strict=True))
    return reports
