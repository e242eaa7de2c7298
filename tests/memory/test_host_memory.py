"""Tests that forked processes do not inherit pinned buffers, and that a container's memory limit is respected."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from fa_train.memory import host_memory
from fa_train.memory.host_memory import available_host_bytes, own_pages

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


def test_available_host_memory_heeds_a_containers_limit(tmp_path):
    assert 0 < available_host_bytes() < 2**50
    assert host_memory._control_group_bytes(tmp_path) is None
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 30\ntotal_inactive_file 40\n")
    (tmp_path / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.usage_in_bytes").write_text("200\n")
    assert host_memory._control_group_bytes(tmp_path) == 1000 - (200 - 40)
    (tmp_path / "memory.max").write_text("700\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert host_memory._control_group_bytes(tmp_path) == 700 - (100 - 30)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").unlink()
    assert host_memory._control_group_bytes(tmp_path) is None


def test_pinned_memory_is_whole_pages_of_the_exact_size(monkeypatch):
    """A buffer's memory is registered when the buffer is made, and unregistered when it is freed."""
    registered = {}

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            registered[address] = nbytes
            return 0

        def cudaHostUnregister(self, address):
            del registered[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    buffers = [host_memory._pinned(nbytes) for nbytes in (5000, 3)]
    assert registered == {buffer.data_ptr(): buffer.numel() for buffer in buffers}
    assert all(address % mmap.PAGESIZE == 0 for address in registered) and list(registered.values()) == [5000, 3]
    del buffers
    gc.collect()
    assert not registered
    monkeypatch.setattr(Runtime, "cudaHostRegister", lambda *arguments: 801)
    with pytest.raises(ValueError, match=r"pinning 0\.03 GiB failed with CUDA error 801\. Set memory\.offload=false$"):
        host_memory._pinned(2**25)
