"""Decisions that must be the same on all ranks, such as the run's folder: rank 0 makes them and tells the others.

They are needed before the process group exists. Ranks that torchrun or srun started talk through torch's TCPStore at
the address where the group will be made. Ranks that Lightning started are children of rank 0 and inherit its answers.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import DistStoreError, TCPStore

INHERITED = "FA_TRAIN_DECISIONS"  # the environment variable with the answers of a rank 0 that starts the other ranks
PATIENCE = timedelta(minutes=10)  # for rank 0, which may start later than others
GOODBYE = timedelta(seconds=10)  # in which the other ranks read rank 0's error
_ASKED: Counter[str] = Counter()  # how often this process has asked each question; all ranks ask the same


def decided_by_rank_zero(question: str, decide: Callable[[], Any]) -> Any:
    """decide() of rank 0, which must be a value that JSON can hold, on all ranks.

    Raises: the ValueError of rank 0's decide(), on all ranks.
    """
    ranks = _ranks()
    if ranks is not None:
        return _through_store(_store(), ranks, question, decide)
    if int(os.environ.get("LOCAL_RANK", "0")) > 0 and INHERITED in os.environ:
        return json.loads(os.environ[INHERITED])[question]
    answer = decide()
    os.environ[INHERITED] = json.dumps(json.loads(os.environ.get(INHERITED, "{}")) | {question: answer})
    return answer


def fresh_folder(wanted: str) -> str:
    """Makes the folder `wanted`, or the first of `wanted`-1, `wanted`-2, … that did not exist; its path."""
    folder, number = Path(wanted), 0
    while True:
        try:
            folder.mkdir(parents=True)  # of two processes, one fails
        except FileExistsError:
            number += 1
            folder = Path(f"{wanted}-{number}")
        else:
            return str(folder)


def _ranks() -> ClusterEnvironment | None:
    """What started several ranks, as Lightning sees it; None if it was not torchrun or srun."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            found = environment()
            return found if found.world_size() > 1 else None
    return None


@cache
def _store() -> TCPStore:
    """Lives as long as this process: other ranks may read late. torchrun's agent has one, else rank 0 starts it."""
    ranks = _ranks()
    assert ranks is not None
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        ranks.main_address,
        ranks.main_port,
        is_master=ranks.global_rank() == 0 and not of_agent,
        timeout=PATIENCE,
        wait_for_workers=False,
        multi_tenant=True,  # the process group's store has the same address
    )


def _through_store(store: TCPStore, ranks: ClusterEnvironment, question: str, decide: Callable[[], Any]) -> Any:
    _ASKED[question] += 1
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives its workers
    key = f"fa_train/{restarts}/{question}/{_ASKED[question]}"
    if ranks.global_rank() == 0:
        try:
            answer = decide()
        except ValueError as error:
            store.set(key, json.dumps({"error": str(error)}))
            with suppress(DistStoreError):  # this process may hold the store, so it ends after the others have read
                store.wait([f"{key}/{rank}" for rank in range(1, ranks.world_size())], GOODBYE)
            raise
        store.set(key, json.dumps({"answer": answer}))
        return answer
    told = json.loads(store.get(key))
    if "error" in told:
        store.set(f"{key}/{ranks.global_rank()}", "read")
        raise ValueError(told["error"])
    return told["answer"]
