"""Makes Ctrl-C end a program at once while it starts.

This file imports little. train.py imports it first, because the other imports take a second, and Ctrl-C must work
during them.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

from fa_train.parallel.ranks import given_rank

INTERRUPTED = "interrupted"  # printed if Ctrl-C ends a program before training has started


def ctrl_c_ends_at_once() -> None:
    """Makes Ctrl-C end this process at once. A process prints one line before it ends, unless its rank is above 0.

    While the program starts, libraries can swallow a KeyboardInterrupt. If the process already ignores Ctrl-C, nothing
    changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def ctrl_c_raises() -> None:
    """Undoes `ctrl_c_ends_at_once`: Ctrl-C raises KeyboardInterrupt, so that the program cleans up."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    if given_rank() in (None, "0"):  # print is not safe in a signal handler
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + signum)
