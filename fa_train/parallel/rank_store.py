"""Sends decisions, and the reasons for failures, between ranks that torchrun or srun started.

The exchange also works before the process group exists.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import DistError, DistStoreError, TCPStore

PATIENCE = timedelta(minutes=10)  # other ranks wait at most this long for the store of rank 0, which may start later
GOODBYE = timedelta(seconds=10)  # rank 0 waits at most this long for other ranks to read its error
CONSEQUENCE = timedelta(seconds=1)  # after a lost connection, a rank waits at most this long for another rank's error
_ASKED: Counter[str] = Counter()  # the number of calls of decided_through_store for each question


def cluster_environment() -> ClusterEnvironment | None:
    """Returns Lightning's cluster environment if torchrun or srun started several ranks, otherwise None."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            found = environment()
            return found if found.world_size() > 1 else None
    return None


@cache
def _store() -> TCPStore:
    """Returns the store of torchrun's agent. If there is no agent, rank 0 hosts the store.

    Rank 0 hosts its store until it exits, because other ranks may start late.
    """
    ranks = cluster_environment()
    assert ranks is not None
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        ranks.main_address,
        ranks.main_port,
        is_master=ranks.global_rank() == 0 and not of_agent,
        timeout=PATIENCE,
        wait_for_workers=False,
        multi_tenant=True,  # the process group will open a second store at the same address
    )


def decided_through_store(ranks: ClusterEnvironment, question: str, decide: Callable[[], Any]) -> Any:
    """Calls decide() on rank 0 and returns the result on all ranks.

    Raises: ValueError on all ranks if decide() raises it on rank 0.
    """
    store = _store()
    _ASKED[question] += 1
    key = _key(question, str(_ASKED[question]))
    if ranks.global_rank() == 0:
        try:
            answer = decide()
        except ValueError as error:
            store.set(key, json.dumps({"error": str(error)}))
            with suppress(DistStoreError):  # rank 0 may host the store, so wait until all ranks have read the error
                store.wait([f"{key}/{rank}" for rank in range(1, ranks.world_size())], GOODBYE)
            raise
        store.set(key, json.dumps({"answer": answer}))
        return answer
    _wait(store, key)
    told = json.loads(store.get(key))
    if "error" in told:
        store.set(f"{key}/{ranks.global_rank()}", "read")
        raise ValueError(told["error"])
    return told["answer"]


def compared_through_store(
    ranks: ClusterEnvironment, question: str, own: str, compare: Callable[[int, str], None]
) -> None:
    """Implements fa_train.parallel.decisions.compared_by_rank_zero with torch's TCPStore.

    All ranks raise the error of rank 0. If a rank raised another error, it would end, and rank 0 would wait for it.
    """
    store, others = _store(), range(1, ranks.world_size())
    key = _key(question, str(_ASKED[question] + 1), "text")
    if ranks.global_rank() != 0:
        store.set(f"{key}/{ranks.global_rank()}", own)

    def check() -> None:
        try:
            store.wait([f"{key}/{rank}" for rank in others], PATIENCE)
        except DistStoreError:
            missing = [rank for rank in others if not store.check([f"{key}/{rank}"])]
            raise ValueError(f"all ranks must start within {PATIENCE}; got no message from ranks {missing}") from None
        for rank in others:
            text = store.get(f"{key}/{rank}").decode()
            if text != own:
                compare(rank, text)

    decided_through_store(ranks, question, check)


def _wait(store: TCPStore, key: str) -> None:
    """Waits for rank 0's answer, without a time limit: rank 0 may check a large checkpoint on a slow file system.

    The wait also ends if rank 0 ends: the launcher ends this rank, or torch raises DistNetworkError because the store
    is closed.
    """
    while True:
        with suppress(DistStoreError):  # raised after PATIENCE
            store.wait([key], PATIENCE)
            return


def tell_reason(reason: str) -> None:
    """Tells all ranks why this rank fails.

    If several ranks fail, the store keeps only the reason that arrives first.
    """
    with suppress(DistError):  # the process that hosts the store may have ended
        if _ASKED:  # before the first call of decided_through_store, this rank may be unable to connect
            _store().compare_set(_key("reason"), "", reason)


def told_reason() -> str | None:
    """Returns the reason that the first failed rank has sent, or None if no rank has sent a reason."""
    with suppress(DistError):
        if _ASKED:
            _store().wait([_key("reason")], CONSEQUENCE)
            return _store().get(_key("reason")).decode()
    return None


def _key(*names: str) -> str:
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # after a restart, the store still has old keys
    return "/".join(["fa_train", restarts, *names])
