"""If SIGTERM ends a benchmark, the benchmark also ends the process of the running case."""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

import pytest

from scripts.bench import case_process
from scripts.bench.case_process import result_of
from scripts.bench.command_line import sigterm_raises


class Running:
    """A fake process of a case. While this process runs, SIGTERM is sent to the benchmark.

    killed: the process groups that were killed, with the signals.
    """

    pid = 2**22 + 1  # Linux has no process with this pid
    killed: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, *_, **options):
        assert options["start_new_session"]

    def communicate(self, timeout=None):
        if timeout is not None:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Case:
    steps: int


def test_sigterm_ends_the_process_of_the_case(monkeypatch):
    monkeypatch.setattr(case_process.subprocess, "Popen", Running)
    monkeypatch.setattr(case_process.os, "killpg", lambda group, number: Running.killed.append((group, number)))
    before = signal.getsignal(signal.SIGTERM)
    Running.killed.clear()
    try:
        sigterm_raises()
        with pytest.raises(SystemExit) as ended:
            result_of("scripts.bench.step", Case(2), timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and Running.killed == [(Running.pid, signal.SIGKILL)]
