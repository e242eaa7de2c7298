"""Makes the file name and the header of a results page."""

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch
import triton


def describe(command: str, commit: str | None, today: date) -> dict[str, str]:
    """Returns what a reader needs to repeat a measurement: command, commit, date, GPU and versions."""
    if commit is None:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown: no git checkout, and no --commit"
    processor = f"none; CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "command": command,
        "commit": commit,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}",
        "date": today.isoformat(),
    }


def results_prefix(what: str, today: date) -> Path:
    """Returns the path scripts/results/<what>_<gpu>_<yyyymm> for the GPU of this machine."""
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    return Path(__file__).parents[1] / "results" / f"{what}_{gpu}_{today:%Y%m}"
