"""Workers of pytest-xdist share no fixtures, so one worker runs all tests of a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SEVERAL_RANKS

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
TESTS = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def run():
    with open(Path(__file__).with_name("runs"), "a") as runs:
        runs.write(f"{Path(__file__).name} ")

@pytest.mark.parametrize("case", range(9))
def test_case(case, run):
    pass
"""


def test_the_tests_with_several_ranks_exist():
    assert not [path for path in SEVERAL_RANKS if not (PYPROJECT.parent / path).exists()]


@pytest.mark.slow
def test_a_module_fixture_runs_once_with_two_workers(tmp_path):
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    # pytest loads only these two plugins, because loading all plugins would take seconds
    plugins = ["-p", "xdist", "-p", "pytest_timeout"]
    command = [sys.executable, "-m", "pytest", "-c", PYPROJECT, *plugins, "--rootdir", tmp_path, "-n", "2", tmp_path]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert "18 passed" in output, output
    assert sorted((tmp_path / "runs").read_text().split()) == ["test_a.py", "test_b.py"]
