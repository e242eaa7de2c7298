"""Lets a failing rank tell its launcher the reason for the failure.

The launcher is torchrun or train.py. The environment variable TORCHELASTIC_ERROR_FILE holds the path of an error file.
A failing rank writes the reason to the error file, and the launcher shows the reason. The launcher ends all ranks as
soon as one fails. A failing rank also sends the reason to all other ranks, because on several nodes each launcher sees
only the ranks of one node. Ranks that lose their connection to the failing rank report the failing rank's reason.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NoReturn

from fa_train.errors import SHOW_TRACEBACK, OutOfMemoryError, explain, is_of_disk
from fa_train.parallel.ctrl_c import INTERRUPTED
from fa_train.parallel.ranks import given_rank, is_one_of_several, is_started_by_train_py

Kind = Literal["mistake", "out of memory", "lost connection", "exit", "disk", "error"]
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# signals that end a run; SIGHUP is sent when the terminal or the ssh connection closes
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED = tuple(128 + signum for signum in STOPPING)  # exit statuses of ranks that a signal has ended


@contextmanager
def failures_reported(mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """Ends the rank at once if an exception leaves the `with` block, and writes the reason for the failure.

    After Ctrl-C, rank 0 prints one line. Python's usual exit could wait in NCCL for the other ranks.
    A rank that calls sys.exit(0) ends with status 0. If another rank then fails because this rank is gone, the call of
    sys.exit is reported as the reason.
    mistakes: the types of errors that are reported in one line, by default without a traceback.
    """
    try:
        yield
    except SystemExit as end:
        if end.code in STOPPED:
            raise
        if end.code in (None, 0):
            report(end, mistakes)
            raise
        end_rank(end, mistakes)
    except Exception as error:
        end_rank(error, mistakes)
    except KeyboardInterrupt:
        if given_rank() == "0":
            print(INTERRUPTED, file=sys.stderr)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


def signals_to_handle() -> list[signal.Signals]:
    """Returns the signals of `STOPPING`, without SIGHUP if the process ignores it, for example because of nohup."""
    return [x for x in STOPPING if x != signal.SIGHUP or signal.getsignal(x) != signal.SIG_IGN]


def end_rank(error: BaseException, mistakes: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Writes the reason for the failure of this rank, and ends the rank at once. mistakes: as in failures_reported."""
    kind, message = report(error, mistakes)
    if kind == "lost connection":
        print(f"rank {given_rank()} lost its connection to another rank: {message}", file=sys.stderr)
    elif SHOW_TRACEBACK or kind == "error":
        traceback.print_exception(error)
    elif not is_started_by_train_py() and (not os.environ.get(ERROR_FILE) or os.environ.get("RANK") == "0"):
        # otherwise, the launcher prints the error
        print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def report(error: BaseException, mistakes: tuple[type[Exception], ...] = ()) -> tuple[Kind, str]:
    """Writes to the error file why this rank ends. Returns the kind of the error and the message.

    mistakes: as in failures_reported.
    """
    kind = kind_of(error, mistakes)
    if kind in ("mistake", "out of memory", "disk"):
        message = explain(error)
    elif isinstance(error, SystemExit):
        message = f"called sys.exit({error.code!r})"
    else:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if is_one_of_several() and not is_started_by_train_py():
        message = _shared(kind, message)
    if file := os.environ.get(ERROR_FILE):
        reported = {"message": message, "timestamp": int(time.time()), "kind": kind}
        try:
            Path(file).write_text(json.dumps(reported), encoding="utf-8")
        except OSError:
            if Path(file).is_file():  # a device, such as /dev/null, is not deleted
                with suppress(OSError):
                    Path(file).unlink()  # the launcher would fail to read an unfinished file
            print(f"error: {message}", file=sys.stderr)
    return kind, message


def reason(rank: object, kind: Kind, message: str) -> str:
    """Returns one line that says why a rank has failed. kind, message: as the rank has reported them."""
    if kind == "mistake":  # a mistake is usually the same on all ranks, so the line names no rank
        return message
    if kind == "exit":
        return f"rank {rank} {message}"
    return f"rank {rank} ran {message}" if kind == "out of memory" else f"rank {rank} failed: {message}"


def _shared(kind: Kind, message: str) -> str:
    """Sends the reason for this rank's failure to all ranks, with the rank's number. Returns the message to report.

    If this rank has lost its connection, the function sends nothing, and returns the reason that another rank has sent.
    """
    if "fa_train.parallel.rank_store" not in sys.modules:  # no store is connected until rank_store is imported
        return message
    from fa_train.parallel import rank_store

    if kind == "lost connection":
        return rank_store.told_reason() or message
    own = reason(given_rank(), kind, message)
    rank_store.tell_reason(f"rank {given_rank()} failed: {message}" if kind == "mistake" else own)
    return own


def kind_of(error: BaseException, mistakes: tuple[type[Exception], ...] = ()) -> Kind:
    """Classifies an error. A lost connection counts as the consequence of another rank's failure.

    NCCL raises a DistError after a lost connection, and also if GPU memory runs out. In the second case, the message
    has "out of memory", and the kind is "error". The kind "out of memory" is only for OutOfMemoryError.
    """
    if isinstance(error, OutOfMemoryError):
        return "out of memory"
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, mistakes):
        return "mistake"
    if is_of_disk(error):
        return "disk"
    # compare the name of the class, because a rank can fail before it has imported torch
    is_of_torch = any(base.__name__ == "DistError" for base in type(error).__mro__)
    is_lost = (is_of_torch and "out of memory" not in str(error)) or "gloo/transport" in str(error)
    return "lost connection" if is_lost else "error"
