"""Decisions that must be equal on all ranks, such as the run's folder. Rank 0 decides and tells the other ranks.

The decisions are needed before the process group exists. If torchrun or srun starts the ranks, they exchange decisions
through torch's TCPStore, at the address that the process group will use. If Lightning starts the ranks, they are
children of rank 0 and inherit its decisions in an environment variable.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

INHERITED = "FA_TRAIN_DECISIONS"  # the environment variable in which child ranks inherit rank 0's decisions
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}  # torchrun and srun set these environment variables


def decided_by_rank_zero(question: str, decide: Callable[[], Any]) -> Any:
    """Calls decide() on rank 0 and returns the result on all ranks. The result must be convertible to JSON.

    question: a unique name for the decision.
    Raises: ValueError on all ranks if decide() raises it on rank 0.
    """
    if LAUNCHERS & os.environ.keys():
        from fa_train.parallel import rank_store  # this import of torch and Lightning takes seconds

        ranks = rank_store.launched_ranks()
        if ranks is not None:
            return rank_store.decided_through_store(ranks, question, decide)
    if int(os.environ.get("LOCAL_RANK", "0")) > 0 and INHERITED in os.environ:
        return json.loads(os.environ[INHERITED])[question]
    answer = decide()
    os.environ[INHERITED] = json.dumps(json.loads(os.environ.get(INHERITED, "{}")) | {question: answer})
    return answer


def fresh_folder(wanted: str) -> str:
    """Creates the folder `wanted` and returns its path. If `wanted` exists, tries `wanted`-1, `wanted`-2 and so on."""
    folder, number = Path(wanted), 0
    while True:
        try:
            folder.mkdir(parents=True)  # mkdir succeeds in only one of several processes
        except FileExistsError:
            number += 1
            folder = Path(f"{wanted}-{number}")
        else:
            return str(folder)
