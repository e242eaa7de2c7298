"""Every script in scripts/ can be run by its path as well as with `python -m`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

# {script: (arguments, a part of the output)}. If a script imports modules inside functions, its arguments must make the
# script run these imports.
SCRIPTS = {
    "export_hf": (["nowhere.ckpt", "out"], "error: nowhere.ckpt does not exist"),
    "generate": (["nowhere.ckpt", "--prompt", "a"], "error: nowhere.ckpt does not exist"),
    "hf_kernel": (["--help"], "usage: hf_kernel.py"),
    "plan_memory": (["nothing=1"], "error: unknown key nothing"),
    "prepare_data": (["--help"], "Tokenises and packs"),
}


def test_the_table_has_every_script():
    programs = {path.stem for path in (REPOSITORY / "scripts").glob("*.py") if '"__main__"' in path.read_text()}
    assert programs == SCRIPTS.keys()


# Imports the libraries once, and then runs each script in a forked process. The parent process imports no module of the
# repository, so each script must itself add the repository to sys.path.
PROGRAM = """
import ast, os, runpy, sys, traceback
import hydra, lightning, torch, transformers
for script, *arguments in ast.literal_eval(sys.argv[1]):
    if (process := os.fork()) == 0:
        with open(f"{os.path.basename(script)}.txt", "w") as sys.stdout:
            sys.stderr = sys.stdout
            sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                print(end)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()  # a script may have replaced them
        os._exit(0)  # an ordinary exit takes a second
    os.waitpid(process, 0)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Runs all scripts, and returns the folder with their outputs."""
    folder: Path = tmp_path_factory.mktemp("outputs")
    commands = [(str(REPOSITORY / "scripts" / f"{script}.py"), *SCRIPTS[script][0]) for script in SCRIPTS]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "kernels")}
    subprocess.run([sys.executable, "-c", PROGRAM, repr(commands)], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_by_its_path(script, outputs):
    output = (outputs / f"{script}.py.txt").read_text()
    assert SCRIPTS[script][1] in output and "Traceback" not in output
