"""Processes that run cases.

After an illegal memory access, a process can no longer use the GPU.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from scripts.bench.page import first_line
from tests.gpu_check.cases import Case
from tests.kernels.support.attention_check import GPU

LIMIT = 300  # time limit of a case in seconds, including compilation


@dataclass(frozen=True)
class Result:
    case: Case
    error: str  # error message, or "" if the case passed
    kernels: frozenset[str]  # names of the kernels that the case compiled or loaded


def run_all(cases: Sequence[Case], jobs: int) -> Iterator[Result]:
    """Yields the result of each case as soon as the case has ended."""
    waiting = list(reversed(cases))
    workers = [_Worker() for _ in range(min(jobs, len(cases)))]
    busy: dict[Connection, _Worker] = {}
    idle = workers
    while waiting or busy:
        while waiting and idle:
            worker = idle.pop()
            worker.begin(waiting.pop())
            busy[worker.pipe] = worker
        for pipe in wait(list(busy), timeout=5):
            assert isinstance(pipe, Connection)
            worker = busy.pop(pipe)
            result, alive = worker.result()
            yield result
            idle.append(worker if alive else _Worker())
        for pipe, worker in list(busy.items()):
            if time.monotonic() - worker.began > LIMIT:
                busy.pop(pipe)
                worker.process.kill()
                assert worker.case is not None
                yield Result(worker.case, f"did not end within {LIMIT} s", frozenset())
                idle.append(_Worker())
    for worker in idle:
        worker.pipe.send(None)
        worker.process.join()


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self.began = 0.0

    def begin(self, case: Case) -> None:
        self.case, self.began = case, time.monotonic()
        self.pipe.send(case)

    def result(self) -> tuple[Result, bool]:
        """Returns the result of the case, and True if the process can run another case."""
        assert self.case is not None
        try:
            error, kernels, alive = self.pipe.recv()
        except EOFError:
            self.process.join()
            error, kernels, alive = f"the process ended with {self.process.exitcode}", frozenset(), False
        return Result(self.case, error, kernels), alive


def _serve(pipe: Connection) -> None:
    """Runs each case from the pipe until the process receives None or loses its GPU context."""
    from triton import knobs

    from tests.kernels.support.poison import poisoned_memory

    torch.set_num_threads(1)  # one thread, because all worker processes share the CPU cores
    kernels: set[str] = set()
    knobs.runtime.jit_post_compile_hook = lambda **call: kernels.add(f"{call['fn'].name} {call['key']}")
    alive = True
    with poisoned_memory():
        while alive and (case := pipe.recv()) is not None:
            kernels.clear()
            error = ""
            torch.manual_seed(0)
            try:
                case.run()
                _wait_for_gpu()
            except Exception as failure:
                error = first_line(failure)
                alive = _context_lives()
            pipe.send((error, frozenset(kernels), alive))


def _wait_for_gpu() -> None:
    if GPU:
        torch.cuda.synchronize()


def _context_lives() -> bool:
    try:
        _wait_for_gpu()
    except RuntimeError:
        return False
    return True
