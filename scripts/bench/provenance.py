"""Makes the file name and the header of a results page."""

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch
import triton

REPOSITORY = Path(__file__).resolve().parents[2]


def describe(command: str, commit: str | None, today: date) -> dict[str, str]:
    """Returns what a reader needs to repeat a measurement: command, commit, date, GPU and versions."""
    commit = _commit() if commit is None else commit
    processor = f"none; CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "command": command,
        "commit": commit,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}",
        "date": today.isoformat(),
    }


def _commit() -> str:
    """Returns the commit of this repository, which need not be that of the folder in which the command was started."""
    unknown = "unknown: no git checkout, and no --commit"
    if not (REPOSITORY / ".git").exists():  # git would name the commit of a repository around this folder
        return unknown
    try:
        describe = ["git", "describe", "--always", "--dirty"]
        git = subprocess.run(describe, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:  # git is not installed
        return unknown.replace("no git checkout", "git is not installed")
    return git.stdout.strip() if git.returncode == 0 else unknown


def results_prefix(what: str, today: date) -> Path:
    """Returns the path scripts/results/<what>_<gpu>_<yyyymm> for the GPU of this machine."""
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    return Path(__file__).parents[1] / "results" / f"{what}_{gpu}_{today:%Y%m}"
