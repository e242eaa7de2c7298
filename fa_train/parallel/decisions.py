"""Decisions that must be equal on all ranks, such as the run's folder. Rank 0 makes them and tells the others.

The decisions are needed before the process group exists. Ranks that torchrun or srun starts exchange them through
torch's TCPStore, at the address of the later process group. Ranks that Lightning starts are children of rank 0 and
inherit the decisions in an environment variable.
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

INHERITED = "FA_TRAIN_DECISIONS"  # environment variable with rank 0's answers for its child ranks
PATIENCE = timedelta(minutes=10)  # how long to wait for rank 0, which may start later than the others
GOODBYE = timedelta(seconds=10)  # how long rank 0 waits for the others to read its error
_ASKED: Counter[str] = Counter()  # how often this process has asked each question; equal on all ranks


def decided_by_rank_zero(question: str, decide: Callable[[], Any]) -> Any:
    """Calls decide() on rank 0 and returns its result on all ranks. The result must be convertible to JSON.

    question: a unique name of the decision.
    Raises: on all ranks, the ValueError that decide() raised on rank 0.
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


def _ranks() -> ClusterEnvironment | None:
    """Returns Lightning's cluster environment if torchrun or srun started several ranks, otherwise None."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            found = environment()
            return found if found.world_size() > 1 else None
    return None


@cache
def _store() -> TCPStore:
    """Returns the store of torchrun's agent, or else a store that rank 0 hosts.

    Rank 0 hosts it until it exits, because other ranks may be late.
    """
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
            with suppress(DistStoreError):  # this process may host the store: wait until all have read
                store.wait([f"{key}/{rank}" for rank in range(1, ranks.world_size())], GOODBYE)
            raise
        store.set(key, json.dumps({"answer": answer}))
        return answer
    told = json.loads(store.get(key))
    if "error" in told:
        store.set(f"{key}/{ranks.global_rank()}", "read")
        raise ValueError(told["error"])
    return told["answer"]
