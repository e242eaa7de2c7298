"""Every script in scripts/ can be run by its path as well as with `python -m`."""

import os
import subprocess
import sys

import pytest

from tests.support.processes import REPOSITORY

# {script: (arguments, a part of the output)}. Some scripts import modules only inside functions. The arguments of such
# a script must make it run these imports.
SCRIPTS = {
    "ablate_memory": (["--help"], "usage: ablate_memory.py"),
    "export_hf": (["nowhere.ckpt", "out"], "error: nowhere.ckpt does not exist"),
    "generate": (["nowhere.ckpt", "--prompt", "a"], "error: nowhere.ckpt does not exist"),
    "hf_kernel": (["--help"], "usage: hf_kernel.py"),
    "plan_memory": (["nothing=1"], "error: unknown key nothing"),
    "prepare_data": (["--help"], "Tokenises and packs"),
    "soak": (["--help"], "usage: soak.py"),
}


def test_the_table_has_every_script():
    programs = {path.stem for path in (REPOSITORY / "scripts").glob("*.py") if '"__main__"' in path.read_text()}
    assert programs == SCRIPTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_by_its_path(script, tmp_path):
    arguments, expected = SCRIPTS[script]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / f"{script}.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "kernels")},  # the script itself must find the repository
        capture_output=True,
        text=True,
    )
    assert expected in done.stdout + done.stderr and "Traceback" not in done.stderr
