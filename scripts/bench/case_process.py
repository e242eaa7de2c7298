"""Runs a case of a benchmark in a new process, which gets the case and returns its result as JSON."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any, TypeVar

from scripts.bench.command_line import REPOSITORY

Case = TypeVar("Case")


def result_of(module: str, case: Any, timeout: float, **environment: str) -> dict[str, Any]:
    """Runs `python -m module --case CASE`, and returns the object in the last line of its output.

    case: an object of a dataclass. environment: additional environment variables for the process.
    Raises: subprocess.TimeoutExpired if the process takes longer than `timeout` seconds. MemoryError if Linux killed
    the process. RuntimeError with the reason if the process failed otherwise.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--case", json.dumps(asdict(case))],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the compiler processes that the case has started
        process.communicate()
        raise
    if process.returncode == -signal.SIGKILL:  # The Linux OOM killer uses SIGKILL when host memory is exhausted.
        raise MemoryError(f"{module} was killed")
    if process.returncode:
        print(errors, file=sys.stderr)
        last_line = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise RuntimeError(last_line.removeprefix("error: "))
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def case_of(kind: type[Case], settings: dict[str, Any]) -> Case:
    """Rebuilds a case from JSON, which stores tuples as lists."""
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()})
