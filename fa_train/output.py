"""Keeps print from failing if the encoding lacks a character, or if nothing reads the pipe or terminal any more."""

import errno
import io
import os
import sys
from typing import Any

VARIABLE = "PYTHONIOENCODING"  # Python reads this variable when a process starts; its format is encoding:errors


def replace_unprintable() -> None:
    """Makes print write ? for each character that the encoding of stdout lacks, in this process and in new processes.

    A run could otherwise end with a UnicodeEncodeError, for example at the ≤ in its report with a Latin-1 locale.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout.errors != "strict":
        return  # the user or Python has already chosen how to print such characters
    sys.stdout.reconfigure(errors="replace")
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '').partition(':')[0]}:replace"


def outlive_readers() -> None:
    """Makes this process discard its output after the terminal is closed, or the reader of the pipe has ended.

    In `python train.py | tee log`, Ctrl-C ends tee first. A print would then raise a BrokenPipeError, which could end
    the run in the middle of an update of the weights.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            replacement = io.TextIOWrapper(
                io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            stream.flush()
            setattr(sys, name, replacement)


class _Output(io.FileIO):
    """The file of stdout or stderr. Discards output once nothing can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is closed
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for code that writes to the file descriptor
            os.close(nowhere)
            return len(data)
