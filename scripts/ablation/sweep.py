"""Runs the cases of an ablation: each in a process of its own, stoppable, what is finished never twice.

Processes are forked from a server that has imported everything and touched no GPU, so a case costs no imports; CUDA
begins in the case's own process, and ends with it.
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

from scripts.ablation.cases import KINDS, Case, Result, measure

REPOSITORY = Path(__file__).resolve().parents[2]
Value = TypeVar("Value")
Finished = dict[Case, Result]


class ProcessError(RuntimeError):
    """A process ended without an answer: by an exception, a signal, or its time."""

    def __init__(self, reason: str, exitcode: int | None = None) -> None:
        super().__init__(reason)
        self.exitcode = exitcode


@cache
def start_server() -> None:
    """Starts what processes are forked from. It looks for modules where PYTHONPATH says, not where sys.path does."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # asked through NVML, whether there is a GPU leaves a process free to fork
    settings = {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with patch.dict(os.environ, settings):
        forkserver.set_forkserver_preload([__name__])
        forkserver.ensure_running()


def call_apart(function: Callable[..., Value], arguments: tuple[Any, ...], timeout: float, log: Path) -> Value:
    """function(*arguments) in a process of its own, for at most `timeout` seconds; what it prints goes to `log`.

    Raises: ProcessError where there is no answer. The process is gone when this returns or raises.
    """
    start_server()
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments, str(log)))
    process.start()
    sender.close()  # else the end of the process would not end the pipe
    try:
        if not receiver.poll(timeout):
            raise ProcessError(f"not done after {timeout:g} s")
        value, error = receiver.recv()
        process.join(10)  # its memory is free when it is gone
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
    """In the new process: sends the value, or the error's type and first line."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    value = error = None
    try:
        value = function(*arguments)
    except Exception as raised:
        traceback.print_exc()
        said: BaseException = raised
        while isinstance(said, InstantiationException) and said.__cause__:  # Hydra's, around what was wrong
            said = said.__cause__
        first_line, *_ = str(said).strip().splitlines() or [""]
        error = f"{type(said).__name__}: {first_line}"
    sender.send((value, error))


def run_apart(case: Case, timeout: float, log: Path) -> Result:
    """The case's result, however its process ends."""
    return apart(measure, (case,), timeout, log)


def apart(function: Callable[..., Result], arguments: tuple[Any, ...], timeout: float, log: Path) -> Result:
    """function(*arguments) as by call_apart; that there is no answer is a result."""
    try:
        return call_apart(function, arguments, timeout, log)
    except ProcessError as error:
        if error.exitcode == -signal.SIGKILL:  # how Linux ends a process when the host's memory is out
            return Result("oom")
        return Result(f"failed: {error}")


def load(path: Path) -> Finished:
    """What results.jsonl has, a line a case."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {case_of(line["kind"], line["case"]): Result(**line["result"]) for line in lines}


def case_of(kind: str, settings: dict[str, Any]) -> Case:
    """JSON has lists where a case has tuples."""
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()}
    return KINDS[kind](**values)


def save(results: Finished, path: Path) -> None:
    """Replaces the file whole, so that an interruption leaves no half a line."""
    new = path.with_suffix(".new")
    lines = [
        json.dumps({"kind": case.KIND, "case": asdict(case), "result": asdict(result)})
        for case, result in results.items()
    ]
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


def sweep(
    cases: list[Case],
    path: Path,
    run: Callable[[Case], Result],
    report: Callable[[Case, Result], None],
    max_step_seconds: float,
    budget: float = math.inf,
) -> list[tuple[Case, Result]]:
    """All cases with their results, in order; those that `path` has as ok or oom are not run again.

    A case is skipped where a shorter one of its line ran out of memory, and not run where the shorter ones let expect
    a step of more than max_step_seconds, or where `budget` seconds are over. `report` is told of every case that ran.
    Cases of a line must come shortest first.
    """
    finished, ends = load(path), time.monotonic() + budget
    measured: dict[Case, list[tuple[int, float]]] = {}  # by line, length and seconds of a step
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
                    result = Result(f"not run: the sweep's {budget:g} s were over")
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
    """The result of a case where a shorter one of its line ran out of memory."""
    lengths = [other.seq_len for other, result in before if result.oom and other.line == case.line]
    shorter = min(lengths, default=case.seq_len)
    return Result(f"skipped: {shorter} ran out of memory") if shorter < case.seq_len else None


def expected_seconds(points: list[tuple[int, float]], seq_len: int) -> float:
    """a N + b N^2 through the last two lengths measured, neither negative; one length alone counts as all N."""
    if not points:
        return 0.0
    n, seconds = points[-1]
    if len(points) == 1:
        return seconds * seq_len / n
    shorter, fewer_seconds = points[-2]
    b = (seconds / n - fewer_seconds / shorter) / (n - shorter)
    b = min(max(b, 0.0), seconds / n**2)
    return (seconds / n - b * n) * seq_len + b * seq_len**2
