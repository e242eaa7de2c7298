"""Prints to terminals and files whose encoding lacks some characters."""

import io
import os
import sys

VARIABLE = "PYTHONIOENCODING"  # Python reads it when a process starts; the format is encoding:errors


def replace_unprintable() -> None:
    """Makes print write ? for each character that the encoding of stdout lacks, here and in new processes.

    Otherwise a run would end with a UnicodeEncodeError, for example at the ≤ of its report if the locale is Latin-1.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout.errors != "strict":
        return  # the user or Python has chosen what happens
    sys.stdout.reconfigure(errors="replace")
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '').partition(':')[0]}:replace"
