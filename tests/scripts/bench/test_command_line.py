"""If SIGTERM ends a benchmark, the benchmark also ends the process of the running case."""

import os
import signal
from typing import ClassVar

import pytest

from scripts.bench import memory, step
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


@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(
            memory, memory.Case("nano", 64, "none", "cpu", "sdpa", compiled=False, steps=2, slow_step=60), id="memory"
        ),
        pytest.param(step, step.Case("nano", 64, "ours-none", "cpu", "sdpa", steps=2, slow_step=60), id="step"),
    ],
)
def test_sigterm_ends_the_process_of_the_case(module, case, monkeypatch):
    monkeypatch.setattr(module.subprocess, "Popen", Running)
    monkeypatch.setattr(module.os, "killpg", lambda group, number: Running.killed.append((group, number)))
    before = signal.getsignal(signal.SIGTERM)
    Running.killed.clear()
    try:
        sigterm_raises()
        with pytest.raises(SystemExit) as ended:
            module.run_apart(case, timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and Running.killed == [(Running.pid, signal.SIGKILL)]
