"""Decisions that must be equal on all ranks, such as the run's folder. Rank 0 makes them and tells the others.

The decisions are needed before the process group exists. Ranks that torchrun or srun starts exchange them through
torch's TCPStore, at the address of the later process group. Ranks that Lightning starts are children of rank 0 and
inherit the decisions in an environment variable.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

INHERITED = "FA_TRAIN_DECISIONS"  # environment variable with rank 0's answers for its child ranks
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}  # environment variables that torchrun and srun set


def decided_by_rank_zero(question: str, decide: Callable[[], Any]) -> Any:
    """Calls decide() on rank 0 and returns its result on all ranks. The result must be convertible to JSON.

    question: a unique name of the decision.
    Raises: on all ranks, the ValueError that decide() raised on rank 0.
    """
    if LAUNCHERS & os.environ.keys():
        from fa_train.parallel import rank_store  # imports torch and Lightning, which takes seconds

        ranks = rank_store.launched_ranks()
        if ranks is not None:
            return rank_store.decided_through_store(ranks, question, decide)
    if int(os.environ.get("LOCAL_RANK", "0")) > 0 and INHERITED in os.environ:
        return json.loads(os.environ[INHERITED])[question]
    answer = decide()
    os.environ[INHERITED] = json.dumps(json.loads(os.environ.get(INHERITED, "{}")) | {question: answer})
    return answer


def fresh_folder(wanted: str) -> str:
    """Creates the folder `wanted` and returns its path. If it exists, tries `wanted`-1, `wanted`-2, … instead."""
    folder, number = Path(wanted), 0
    while True:
        try:
            folder.mkdir(parents=True)  # if two processes try, one of them fails
        except FileExistsError:
            number += 1
            folder = Path(f"{wanted}-{number}")
        else:
            return str(folder)
