"""Says what this process is: the only process of a run, one of several ranks, or the launcher that starts the ranks.

| process | is_launched | is_started_by_train_py | ranks_to_start |
|:--|:--|:--|:--|
| `python train.py` with one device: trains the model itself | no | no | 1 |
| `python train.py trainer.devices=4`: the launcher, which trains nothing | no | no | 4 |
| one of the four ranks that this launcher starts | yes | yes | 1 |
| a rank that torchrun or srun has started | yes | no | 1 |

This file does not import torch, because train.py uses this file first, and importing torch takes seconds.
"""

import ctypes
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

# the environment variable in which train.py's launcher passes decisions, such as the run's folder, to its ranks as JSON
DECISIONS = "FA_TRAIN_TOLD"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
FIRST_SPECIAL_STEP = 0xFFFFFFFA  # from slurm.h: numbers from here on belong to batch scripts and salloc's shells


def is_launched() -> bool:
    """Returns whether train.py, torchrun or srun has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or _tasks_of_srun() > 1


def is_one_of_several() -> bool:
    """Returns whether this process is one of at least two ranks."""
    return world_size(1) > 1


def given_rank() -> str | None:
    """Returns the rank number that a launcher gave this process, or None if no launcher started this process."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID")) if is_launched() else None


def is_started_by_train_py() -> bool:
    """Returns whether train.py has started this process as a rank."""
    return DECISIONS in os.environ


def launcher_decisions() -> dict[str, Any]:
    """Returns the decisions that train.py's launcher passed to this rank, or an empty dict in any other process."""
    decisions: dict[str, Any] = json.loads(os.environ.get(DECISIONS, "{}"))
    return decisions


def ranks_to_start(trainer: Mapping[str, Any]) -> int:
    """Returns the number of ranks that this process must start, or 1 if this process itself trains the model.

    trainer: the node `trainer` of a config.
    Raises: ValueError if the run has several nodes, on which torchrun or srun must start the ranks. ValueError if this
    process counts as one of several tasks of a SLURM job, but was not started by srun.
    """
    if is_launched():
        _require_srun()
        return 1
    if trainer.get("num_nodes", 1) > 1:
        raise ValueError(
            f"a run with trainer.num_nodes={trainer['num_nodes']} must be started by torchrun or srun on each node; "
            "got neither. See docs/several_gpus.md"
        )
    return devices_per_node(trainer)


def devices_per_node(trainer: Mapping[str, Any]) -> int:
    """Returns the number of devices that a run uses on each machine. trainer: the node `trainer` of a config."""
    devices = trainer.get("devices", "auto")
    if devices not in ("auto", -1):
        return len(devices) if isinstance(devices, Sequence) else int(devices)
    if trainer.get("accelerator", "auto") not in ("auto", "gpu", "cuda"):
        return 1
    import torch  # takes seconds

    return max(1, torch.cuda.device_count())


def world_size(n_started: int) -> int:
    """Returns the number of ranks of the run. n_started: the result of `ranks_to_start`."""
    return int(os.environ.get("WORLD_SIZE", _tasks_of_srun())) if is_launched() else n_started


def end_with_launcher() -> None:
    """Makes Linux kill this process when its launcher ends, even if the launcher is killed by SIGKILL."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _require_srun() -> None:
    """Raises: ValueError if SLURM_NTASKS is the only reason why this process counts as one of several ranks.

    SLURM also sets SLURM_NTASKS in a batch script, but starts other tasks only with srun. srun sets SLURM_STEP_ID.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    if "TORCHELASTIC_RUN_ID" in os.environ or (step.isdecimal() and int(step) < FIRST_SPECIAL_STEP):
        return
    found = f"SLURM_STEP_ID={step}" if step else "no SLURM_STEP_ID"
    raise ValueError(
        f"srun must start the {_tasks_of_srun()} tasks of this SLURM job; got a process that srun has not started "
        f"({found}). Write srun before python. To let train.py start the ranks, set SLURM_JOB_NAME=interactive"
    )


def _tasks_of_srun() -> int:
    """Returns the number of srun's tasks, or 1 in an interactive allocation.

    In an interactive allocation, this process was started from a shell, and not by srun.
    """
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return 1
    return int(os.environ.get("SLURM_NTASKS", "1"))
