"""Tests that text is printed even if stdout's encoding lacks some characters of the text."""

import os
import subprocess
import sys

import pytest

from tests.support.processes import REPOSITORY

IN_NEW_PROCESS = """
import subprocess, sys
from fa_train.output import replace_unprintable
replace_unprintable()
subprocess.run([sys.executable, "-c", "print('child \\u2264 é')"], check=True)
print("parent \\u2264 é")
"""


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        pytest.param("latin-1", "? é", id="latin-1"),
        pytest.param("ascii", "? ?", id="ascii"),
        pytest.param("utf-8", "≤ é", id="utf-8"),
        pytest.param("ascii:backslashreplace", r"\u2264 \xe9", id="chosen-by-the-user"),
    ],
)
def test_a_character_that_stdout_lacks_is_replaced_in_each_process(encoding, printed):
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", IN_NEW_PROCESS], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode(encoding.partition(":")[0]).splitlines()
    assert lines == [f"child {printed}", f"parent {printed}"]


def test_train_prints_such_a_character(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "train.py"), "run_name='≤'", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert b"run_name: ?" in done.stdout, done.stderr
