"""If Linux kills a case's process, the case counts as out of host memory."""

import signal
import subprocess

import pytest

from scripts.bench import memory, step
from scripts.bench.case_process import Case


class Killed:
    """Stands for a case's process that Linux has killed."""

    returncode = -signal.SIGKILL

    def __init__(self, *_, **options):
        assert options["start_new_session"]

    def communicate(self, timeout):
        return "", ""


@pytest.mark.parametrize(
    ("module", "case", "outcome", "note"),
    [
        pytest.param(
            memory, Case("nano", 64, "none", "cpu", "sdpa", steps=2, slow_step=60),
            "out of memory", None, id="memory",
        ),
        pytest.param(
            step, Case("nano", 64, "ours-none", "cpu", "sdpa", steps=2, slow_step=60),
            "oom", "the host's memory", id="step",
        ),
    ],
)  # fmt: skip
def test_a_killed_case_ran_out_of_memory(module, case, outcome, note, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Killed)
    row = module.run_apart(case, timeout=60)
    assert (row.outcome, getattr(row, "note", None)) == (outcome, note)
