"""Decisions that must be equal on all ranks, such as the run's folder.

Rank 0 makes a decision, and sends it to the other ranks.
The decisions are needed before the process group exists. Ranks exchange decisions through torch's TCPStore, at the
address that the process group uses later. The launcher of train.py makes some decisions itself, and tells them to all
ranks in an environment variable.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa_train.parallel.ranks import is_launched, launcher_decisions


def decided_by_rank_zero(question: str, decide: Callable[[], Any]) -> Any:
    """Calls decide() on rank 0 and returns the result on all ranks. The result must be convertible to JSON.

    question: a unique name for the decision.
    Raises: ValueError on all ranks if decide() raises it on rank 0.
    """
    if question in launcher_decisions():
        return launcher_decisions()[question]
    if is_launched():
        from fa_train.parallel import rank_store  # rank_store imports torch and Lightning, which takes seconds

        ranks = rank_store.cluster_environment()
        if ranks is not None:
            return rank_store.decided_through_store(ranks, question, decide)
    return decide()


def compared_by_rank_zero(question: str, own: str, compare: Callable[[int, str], None]) -> None:
    """On rank 0, calls compare(rank, text) for each text that differs from the text of rank 0.

    question: a unique name for the comparison. own: the text of this rank.
    Raises: ValueError on all ranks if compare() raises it, or if a rank does not send its text.
    """
    if not is_launched():
        return
    from fa_train.parallel import rank_store  # rank_store imports torch and Lightning, which takes seconds

    ranks = rank_store.cluster_environment()
    if ranks is not None:
        rank_store.compared_through_store(ranks, question, own, compare)


def fresh_folder(wanted: str) -> str:
    """Creates the folder `wanted` and returns its path.

    If the folder `wanted` exists, creates the first of `wanted-1`, `wanted-2` and so on that does not exist.
    Raises: ValueError if the parent folder of `wanted` cannot be created, for example because `runs` is a broken link.
    """
    folder, number = Path(wanted), 0
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the run's folder must be in a folder that can be created; got {folder}: {error}") from error
    while True:
        try:
            folder.mkdir()  # mkdir succeeds in only one of several processes
        except FileExistsError:
            number += 1
            folder = Path(f"{wanted}-{number}")
        else:
            return str(folder)
