"""Describes how to repeat a measurement, and names the files of its results."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import triton

from scripts.bench.command_line import REPOSITORY


def describe(program: str, commit: str | None) -> dict[str, str]:
    """Returns what a reader needs to repeat a measurement: command, commit, date, GPU and versions.

    program: what follows `python` in the command, such as "-m scripts.bench.host", without the arguments in sys.argv.
    """
    commit = _commit() if commit is None else commit
    processor = f"none; CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "command": shlex.join(["python", *program.split(), *sys.argv[1:]]),
        "commit": commit,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}",
        "date": date.today().isoformat(),
    }


def _commit() -> str:
    """Returns the commit of this repository, even if the command was started in another folder."""
    unknown = "unknown: no git checkout, and no --commit"
    if not (REPOSITORY / ".git").exists():  # git could return the commit of an enclosing repository
        return unknown
    try:
        describe = ["git", "describe", "--always", "--dirty"]
        git = subprocess.run(describe, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:  # git is not installed
        return unknown.replace("no git checkout", "git is not installed")
    return git.stdout.strip() if git.returncode == 0 else unknown


def results_prefix(given: Path | None, what: str) -> Path:
    """Returns the prefix of the result files, and creates its folder.

    given: the value of --out. If `given` is None, the prefix is scripts/results/<what>_<gpu>_<yyyymm>.
    """
    if given is None:
        gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
        given = REPOSITORY / "scripts" / "results" / f"{what}_{gpu}_{date.today():%Y%m}"
    given.parent.mkdir(parents=True, exist_ok=True)
    return given
