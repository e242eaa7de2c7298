"""Finds how much host memory is available, and allocates pinned buffers for asynchronous copies to and from a GPU."""

import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor


class HostPool:
    """A pool of host buffers. The pool frees a buffer only if a larger one replaces it."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.free: list[Tensor] = []
        self.allocated = 0  # the number of allocations so far; tests check that only the first step allocates
        self.nbytes = 0  # the total size of all buffers

    def require(self, nbytes: int, *, everything: bool) -> None:
        """Raises: ValueError if the host has too little memory to grow the pool to nbytes."""
        if nbytes > self.nbytes:
            require_host_memory(nbytes, available_host_bytes() + self.nbytes, everything=everything)

    def take(self, nbytes: int) -> Tensor:
        """Returns a uint8 buffer of at least nbytes bytes: the smallest free buffer that is large enough, or a new one.

        If no free buffer is large enough, the new buffer replaces the largest free buffer.
        """
        self.free.sort(key=Tensor.numel)
        for place, buffer in enumerate(self.free):
            if buffer.numel() >= nbytes:
                return self.free.pop(place)
        if self.free:
            self.nbytes -= self.free.pop().numel()
        self.allocated += 1
        self.nbytes += nbytes
        return _pinned(nbytes) if self.pinned else torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Puts a buffer back into the pool. Copies on the copy stream may still use the buffer."""
        self.free.append(buffer)


def available_host_bytes() -> int:
    """Returns the available host memory of this machine or container in bytes. Works only on Linux."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limits = [_control_group_bytes(Path(folder)) for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")]
    return min([available, *(limit for limit in limits if limit is not None)])


def require_host_memory(needed: int, available: int, processes: int = 1, *, everything: bool = False) -> None:
    """Raises: ValueError if `available` bytes are not enough for `processes` processes with `needed` bytes each."""
    if needed * processes > available:
        each = f" in each of {processes} processes" if processes > 1 else ""
        offload, other = ("all", "memory=offload") if everything else ("true", "memory.offload=false")
        raise ValueError(
            f"memory.offload={offload} needs {needed / 2**30:.1f} GiB of host memory{each}; {available / 2**30:.1f} "
            f"GiB are available. Choose a shorter seq_len, trainer.precision=bf16-true, or {other}"
        )


def _control_group_bytes(folder: Path) -> int | None:
    """Returns how many bytes are left until a container's memory limit, or None if there is no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),  # cgroup version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # cgroup version 1
    ):
        if (folder / limit).exists() and (folder / limit).read_text().strip() != "max":
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(statistics[cache])  # the page cache can be freed by Linux
            return int((folder / limit).read_text()) - used
    return None


def _pinned(nbytes: int) -> Tensor:
    """Returns a pinned host buffer, (nbytes,) uint8.

    torch's pinned allocator is not used, because it rounds sizes up to a power of two.
    Raises: ValueError if CUDA cannot pin the memory, for example because the system limits pinned memory.
    """
    buffer = own_pages(nbytes)
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    error = int(cudart.cudaHostRegister(address, nbytes, 0))
    if error:
        raise ValueError(
            f"memory.offload needs pinned host memory; pinning {nbytes / 2**30:.2f} GiB failed with CUDA error "
            f"{error}. Set memory.offload=false"
        )

    def unregister() -> None:
        torch.cuda.synchronize()  # a copy may still use the buffer
        cudart.cudaHostUnregister(address)

    weakref.finalize(buffer, unregister).atexit = False
    return buffer


def own_pages(nbytes: int) -> Tensor:
    """Returns zeros in host memory, (nbytes,) uint8, on pages that no other tensor uses. nbytes must be at least 1.

    CUDA pins whole pages. If two tensors shared a page, unpinning one of them could unpin a part of the other. Forked
    processes, such as data workers, do not inherit the memory of the returned tensor, because Linux would copy all
    pinned pages during the fork.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    return buffer.zero_()  # zero_ creates the pages with all threads, but cudaHostRegister would use only one thread
