"""The Makefile works in folders with spaces, and after a first attempt to make .venv has failed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
AS_OLD = "import sys; sys.version_info, sys.version = (3, 10, 2), '3.10.2 (main)'; exec(sys.argv[1])"


@pytest.fixture
def clone(tmp_path):
    """A folder with the Makefile, whose path has a space."""
    folder = tmp_path / "my clone"
    folder.mkdir()
    shutil.copy(REPOSITORY / "Makefile", folder)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def python(folder: Path, check: str, venv: str) -> str:
    """Writes a program that replaces Python. The program runs `check` if its first argument is `-c`, and otherwise runs
    `venv`.
    """
    program = folder / "python"
    program.write_text(f"#!/bin/sh\nif [ $1 = -c ]; then {check}; else {venv}; fi\n")
    program.chmod(0o755)
    return "PYTHON=./python"


def test_an_old_python_is_refused_before_it_makes_the_venv(clone):
    done = make(clone, "train", python(clone, f'{sys.executable} -c "{AS_OLD}" "$2"', "mkdir .venv"))
    assert "error: PYTHON must be Python 3.11 or newer; got Python 3.10.2\n" in done.stderr
    assert done.returncode and not (clone / ".venv").exists()


def test_a_venv_without_pip_is_made_again(clone):
    """On Debian without the package python3-venv, `python3 -m venv` writes bin/python, and then fails."""
    done = make(clone, "train", python(clone, "true", "mkdir -p .venv/bin && touch .venv/bin/python && exit 1"))
    assert done.returncode and not (clone / ".venv" / "bin" / "python").exists()


@pytest.mark.parametrize("target", ["test-oldest-triton", "aot-reports"])
def test_the_path_of_the_oldest_triton_may_have_spaces(target, clone):
    assert f'PYTHONPATH="{clone}/.venv/triton-3.6" ' in make(clone, "--dry-run", target).stdout
