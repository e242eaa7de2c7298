"""Allocates host memory that can be pinned."""

import mmap

import torch
from torch import Tensor


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
