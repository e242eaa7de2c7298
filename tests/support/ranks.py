"""Checks whether ranks can communicate on this machine, builds the environment variables of ranks, and starts ranks."""

import socket
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.support import processes
from tests.support.processes import REPOSITORY
from tests.support.training import quiet_environment

FORKED = REPOSITORY / "tests" / "support" / "forked_ranks.py"  # this script runs train.py and forks its ranks


def processes_can_talk() -> bool:
    """Returns whether ranks can communicate on this machine: a port must be free, and torch must have gloo."""
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
    except OSError:
        return False
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


needs_ports = pytest.mark.skipif(not processes_can_talk(), reason="needs a port of 127.0.0.1 and gloo")


def ranks_of_torchrun(n_ranks: int) -> list[dict[str, str]]:
    """Returns the environment variables that torchrun sets for each of its processes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)]


def forked(tmp_path: Path, launcher: str, *overrides: str) -> CompletedProcess[str]:
    return processes.finish(FORKED, [launcher, *overrides], tmp_path, quiet_environment())
