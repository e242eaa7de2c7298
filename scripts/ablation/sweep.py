"""Runs the cases of an attention ablation in separate processes.

A server process imports all modules once, does not use a GPU, and forks one process for each case.
"""

import json
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from hydra.errors import InstantiationException
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.ablation.cases import KINDS, Case, Result
from scripts.bench.case_process import case_of
from scripts.bench.command_line import REPOSITORY
from scripts.bench.page import first_line

Value = TypeVar("Value")
Finished = dict[Case, Result]


class ProcessError(RuntimeError):
    """Raised if an exception, a signal or the time limit ended a process before it returned a result."""

    def __init__(self, reason: str, exitcode: int | None = None) -> None:
        super().__init__(reason)
        self.exitcode = exitcode


@cache
def start_server() -> None:
    """Starts the server process that forks the processes of the cases.

    The server process does not get the sys.path of the process that starts it.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTORCH_NVML_BASED_CUDA_CHECK makes torch check for a GPU through NVML, without initialising CUDA. After a process
    # has initialised CUDA, processes that it forks cannot use CUDA.
    settings = {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with patch.dict(os.environ, settings):
        forkserver.set_forkserver_preload([__name__])
        forkserver.ensure_running()


def call_apart(function: Callable[..., Value], arguments: tuple[Any, ...], timeout: float, log: Path) -> Value:
    """Runs function(*arguments) in a new process for at most `timeout` seconds.

    The new process has ended when this function returns or raises. Raises: ProcessError if the process ends without a
    result.
    """
    start_server()
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments, str(log)))
    process.start()
    sender.close()  # makes recv raise EOFError if the new process ends without a result
    try:
        if not receiver.poll(timeout):
            raise ProcessError(f"timed out after {timeout:g} s")
        value, error = receiver.recv()
        process.join(10)
    except EOFError:
        process.join()
        raise ProcessError(f"exit status {process.exitcode}", process.exitcode) from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise ProcessError(error)
    return value


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], log: str) -> None:
    """Sends the value that the function returned, or the type and the first line of its error."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    value = error = None
    try:
        value = function(*arguments)
    except Exception as raised:
        traceback.print_exc()
        said: BaseException = raised
        while isinstance(said, InstantiationException) and said.__cause__:
            said = said.__cause__
        error = first_line(said)
    sender.send((value, error))


def apart(function: Callable[..., Result], arguments: tuple[Any, ...], timeout: float, log: Path) -> Result:
    """Runs function(*arguments) with call_apart. If the process fails, the returned result gives the reason."""
    try:
        return call_apart(function, arguments, timeout, log)
    except ProcessError as error:
        if error.exitcode == -signal.SIGKILL:  # The Linux OOM killer uses SIGKILL when host memory is exhausted.
            return Result("oom")
        return Result(f"failed: {error}")


def load(path: Path) -> Finished:
    """Reads the finished cases from results.jsonl, which has one line per case."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {case_of(KINDS[line["kind"]], line["case"]): Result(**line["result"]) for line in lines}


def save(results: Finished, path: Path) -> None:
    """Replaces the file atomically, so that an interruption leaves no incomplete line."""
    new = path.with_suffix(".new")
    lines = [
        json.dumps({"kind": case.KIND, "case": asdict(case), "result": asdict(result)})
        for case, result in results.items()
    ]
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


def require_same_gpu(gpu: str, folder: Path, *, has_results: bool, key: str) -> None:
    """Checks that the results in a folder are of this GPU, and writes the GPU's name to gpu.txt.

    key: the setting that chooses the folder.
    Raises: ValueError if the folder has results, and gpu.txt already has another name.
    """
    file = folder / "gpu.txt"
    if has_results and file.exists() and (found := file.read_text(encoding="utf-8").strip()) != gpu:
        raise ValueError(f"{key} must be a folder with results of {gpu}; got {folder}, whose results are of {found}")
    file.write_text(gpu + "\n", encoding="utf-8")


def sweep(
    cases: list[Case],
    path: Path,
    run: Callable[[Case], Result],
    report: Callable[[Case, Result], None],
    max_step_seconds: float,
    budget: float = math.inf,
) -> list[tuple[Case, Result]]:
    """Returns all cases with their results, in the given order.

    A case does not run again if the file `path` already has its result with the outcome ok or oom.

    `report` is called for every case that ran. Cases that differ only in length must be sorted by length.
    """
    finished, ends = load(path), time.monotonic() + budget
    measured: dict[Case, list[tuple[int, float]]] = {}  # (length, seconds per step) of each measured case
    results: list[tuple[Case, Result]] = []
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*bar) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            points = measured.setdefault(case.line, [])
            result = skipped(case, results) or finished.get(case)
            if result is None or not result.final:
                expected = expected_seconds(points, case.seq_len)
                if expected > max_step_seconds:
                    result = Result(f"not run: a step would take about {expected:.0f} s, {max_step_seconds:g} allowed")
                elif time.monotonic() > ends:
                    result = Result(f"not run: the sweep's budget of {budget:g} s was over")
                else:
                    result = finished[case] = run(case)
                    save(finished, path)
                    report(case, result)
            if result.step_ms is not None:
                points.append((case.seq_len, result.step_ms / 1e3))
            results.append((case, result))
            progress.advance(task)
    return results


def skipped(case: Case, before: Iterable[tuple[Case, Result]]) -> Result | None:
    """Returns a "skipped" result if a shorter case with the same settings ran out of memory, otherwise None."""
    lengths = [other.seq_len for other, result in before if result.oom and other.line == case.line]
    shorter = min(lengths, default=case.seq_len)
    return Result(f"skipped: {shorter} ran out of memory") if shorter < case.seq_len else None


def expected_seconds(points: list[tuple[int, float]], seq_len: int) -> float:
    """Predicts the seconds of a step of N tokens as `a * N + b * N**2`, where a and b are at least 0."""
    if not points:
        return 0.0
    n, seconds = points[-1]
    if len(points) == 1:
        return seconds * seq_len / n
    shorter, fewer_seconds = points[-2]
    b = (seconds / n - fewer_seconds / shorter) / (n - shorter)
    b = min(max(b, 0.0), seconds / n**2)
    return (seconds / n - b * n) * seq_len + b * seq_len**2
