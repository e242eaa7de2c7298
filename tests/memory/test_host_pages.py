"""Host memory for pinned copies is on separate pages, which forked processes do not inherit."""

import mmap
import re
from pathlib import Path

from fa_train.memory.host_pages import own_pages

SMAPS = Path("/proc/self/smaps")


def flags_of(address: int) -> list[str]:
    """Returns the flags that Linux shows for the mapping of an address."""
    found = re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)+?VmFlags: (.*)$", SMAPS.read_text(), re.MULTILINE)
    [flags] = [x[3].split() for x in found if int(x[1], 16) <= address < int(x[2], 16)]
    return flags


def test_forked_processes_do_not_get_the_pages():
    buffer = own_pages(5000)
    assert buffer.shape == (5000,) and not buffer.any() and buffer.data_ptr() % mmap.PAGESIZE == 0
    assert "dc" in flags_of(buffer.data_ptr())  # the Linux manual defines dc as "do not copy area on fork"
