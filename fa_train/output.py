"""Prints to terminals and files whose encoding lacks some characters."""

import io
import os
import sys

VARIABLE = "PYTHONIOENCODING"  # Python reads this variable when a process starts; its format is encoding:errors


def replace_unprintable() -> None:
    """Makes print write ? for each character that the encoding of stdout lacks, in this process and in new processes.

    A run could otherwise end with a UnicodeEncodeError, for example at the ≤ in its report with a Latin-1 locale.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout.errors != "strict":
        return  # the user or Python has already chosen how to print such characters
    sys.stdout.reconfigure(errors="replace")
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '').partition(':')[0]}:replace"
