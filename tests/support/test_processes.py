"""Tests tests.support.processes: a program that runs out of time leaves no process behind."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import finish


@pytest.mark.slow
def test_a_program_over_its_time_ends_with_its_children(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    environment = dict(os.environ)
    assert finish("this", [], tmp_path, environment).returncode == 0  # starts the server, which imports the modules
    with pytest.raises(subprocess.TimeoutExpired):
        finish(program, [], tmp_path, environment, timeout=4)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # the process that adopts an orphan needs some time to reap it
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} lives")
