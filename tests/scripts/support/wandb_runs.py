"""Reads the offline W&B runs of scripts."""

from pathlib import Path

from tests.support import processes
from tests.support.training import quiet_environment


def environment() -> dict[str, str]:
    """Returns the environment of a script that logs to W&B offline, on a machine without a GPU."""
    return quiet_environment() | {"WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}


def inspect(path: Path) -> str:
    """Returns the content of an offline run as JSON."""
    done = processes.finish("wandb", ["leet", "inspect", "--json", str(path)], path.parent, environment())
    assert done.returncode == 0, done.stderr
    return done.stdout
