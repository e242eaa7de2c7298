"""Tests how functions run in new processes."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from scripts.ablation.process import ProcessError, _answer, call_apart
from tests.support.training import REPOSITORY


def fail():
    raise ValueError("a wrong setting\nwith details")


@pytest.mark.slow
def test_a_process_that_dies_costs_itself_alone(tmp_path):
    log = tmp_path / "log"
    for code, exitcode in ((7, 7), (-signal.SIGKILL, -signal.SIGKILL)):
        with pytest.raises(ProcessError, match=f"exit status {exitcode}") as raised:
            call_apart(os._exit, (7,), 60, log) if code > 0 else call_apart(signal.raise_signal, (9,), 60, log)
        assert raised.value.exitcode == exitcode
    with pytest.raises(ProcessError, match="timed out after"):
        call_apart(time.sleep, (60,), 0.5, log)
    with pytest.raises(ProcessError, match=r"^ValueError: a wrong setting$"):
        call_apart(fail, (), 60, log)
    assert call_apart(max, (2, 3), 60, log) == 3
    assert "Traceback" in log.read_text()


def in_new_interpreter(program, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(REPOSITORY / "kernels")  # installed in an ordinary environment
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_new_process_finds_the_modules_of_the_repository(tmp_path):
    """The server gets neither the sys.path nor the imported modules of the program that starts it."""
    program = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from scripts.ablation.process import call_apart
imported = "{{'lightning', 'scripts.ablation.multirun'}} <= {{*__import__('sys').modules}}"
print(call_apart(eval, (imported,), 240, Path("log")))
"""
    assert in_new_interpreter(program, tmp_path) == "True\n"


def program_of_a_long_job(log):
    job = get_context("fork").Process(target=_answer, args=(None, time.sleep, (60,), log))
    job.start()
    log.with_name("job").write_text(f"{job.pid}\n")
    job.join()


def test_a_job_ends_if_sigkill_ends_the_program(tmp_path):
    program, job = get_context("fork").Process(target=program_of_a_long_job, args=(tmp_path / "log",)), tmp_path / "job"
    program.start()
    wait_until(lambda: job.exists() and job.read_text().endswith("\n"))
    program.kill()
    program.join()
    wait_until(lambda: has_ended(job.read_text().strip()))


def has_ended(pid):
    try:
        return "(zombie)" in Path("/proc", pid, "status").read_text()
    except OSError:
        return True


def wait_until(is_true):
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_importing_the_jobs_asks_nothing_of_cuda():
    """Importing the modules of the jobs must not initialise CUDA: a forked process could not initialise CUDA again."""
    program = """
import torch
def refuse(*_): raise AssertionError("CUDA was asked")
for name in ("is_available", "device_count", "get_device_properties", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, refuse)
import fa_train.training, scripts.ablation.multirun
"""
    assert in_new_interpreter(program, REPOSITORY) == ""
