"""Measures the peak of the private memory of this process."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def private_bytes() -> int:
    """Returns this process's anonymous memory in bytes.

    The bytes of mapped files, such as checkpoints that are being read, do not count.
    """
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest growth of private memory, in bytes."""

    bytes = 0


@contextmanager
def peak_growth() -> Iterator[Peak]:
    """Samples private memory every half millisecond, also while torch's operators work on large tensors.

    Before the first sample, freed memory goes back to the system. If the process kept freed memory, allocations could
    reuse it, and private memory would not grow.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, stop = private_bytes(), Peak(), threading.Event()

    def sample() -> None:
        while not stop.is_set():
            peak.bytes = max(peak.bytes, private_bytes() - before)
            time.sleep(5e-4)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.bytes = max(peak.bytes, private_bytes() - before)
