"""Tests prints to a stdout whose encoding lacks some characters, and to a pipe whose reading program has ended."""

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

WITHOUT_READER = """
import os, sys
from fa_train.output import outlive_readers
reader, writer = os.pipe()
os.dup2(writer, 1), os.dup2(writer, 2), os.close(reader)
outlive_readers()
print("a", flush=True), print("b", file=sys.stderr), print("c"), os.write(1, b"d"), os._exit(7)
"""


def test_a_process_outlives_the_reader_of_its_output():
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", WITHOUT_READER], env=environment).returncode == 7


@pytest.mark.parametrize("script", ["plan_memory", "prepare_data"])
def test_a_script_outlives_the_reader_of_its_output(script):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(REPOSITORY / "scripts" / f"{script}.py"), "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_train_outlives_the_reader_of_its_output(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "train.py"), "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_process_outlives_its_terminal():
    terminal, stdout = os.openpty()
    program = "import fa_train.output as x; x.outlive_readers(); print(1, flush=True); input(); print(2, flush=True)"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)
    os.close(stdout)
    assert os.read(terminal, 1) == b"1"
    os.close(terminal)
    _, errors = process.communicate(b"\n", timeout=60)
    assert (process.returncode, errors) == (0, b"")
