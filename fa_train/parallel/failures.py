"""Lets a failing rank tell its launcher the reason.

The launcher is torchrun or train.py. It names a file for the reason in TORCHELASTIC_ERROR_FILE, and shows what the rank
has written there. The launcher ends all ranks as soon as one fails.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from fa_train.errors import SHOW_TRACEBACK, OutOfMemoryError, explain
from fa_train.parallel.ranks import has_own_launcher

Kind = Literal["mistake", "out of memory", "lost connection", "error"]
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@contextmanager
def failures_reported(mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """If an exception leaves the `with` block, writes the reason and ends the rank at once.

    Python's usual exit could wait in NCCL for the other ranks. mistakes: the errors that are explained in one line.
    """
    try:
        yield
    except Exception as error:
        end_rank(error, mistakes)


def end_rank(error: BaseException, mistakes: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Writes the reason for the failure of this rank, and ends the rank at once. mistakes: as in failures_reported."""
    kind = kind_of(error, mistakes)
    has_message = kind in ("mistake", "out of memory")
    message = explain(error) if has_message else f"{type(error).__name__}: {' '.join(str(error).split())}"
    file = os.environ.get(ERROR_FILE)
    if file:
        report = {"message": message, "timestamp": int(time.time()), "kind": kind}
        Path(file).write_text(json.dumps(report), encoding="utf-8")
    if kind == "lost connection":
        print(f"rank {os.environ.get('RANK')} lost its connection to another rank: {message}", file=sys.stderr)
    elif SHOW_TRACEBACK or not has_message:
        traceback.print_exception(error)
    elif not has_own_launcher() and (not file or os.environ.get("RANK") == "0"):
        # in all other cases, the launcher prints the error
        print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def kind_of(error: BaseException, mistakes: tuple[type[Exception], ...] = ()) -> Kind:
    """Classifies an error. A lost connection counts as the consequence of another rank's failure."""
    if isinstance(error, OutOfMemoryError):
        return "out of memory"
    if isinstance(error, mistakes):
        return "mistake"
    # compares names, because the class itself would need torch, and a rank can fail before it has imported torch
    is_of_torch = any(base.__name__ == "DistError" for base in type(error).__mro__)
    return "lost connection" if is_of_torch or "gloo/transport" in str(error) else "error"
