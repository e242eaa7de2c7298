"""Pretends that the device is a GPU with a given compute capability and a given size of shared memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from fa_kernels.flash_attention import tiles


@contextmanager
def pretended_gpu() -> Iterator[Callable[[tuple[int, int], int], torch.device]]:
    """Yields a function that configures the pretended GPU."""
    caches = (tiles.launch_tiles, tiles._warn_of_guesses)
    given: dict[str, object] = {}

    def pretend(capability: tuple[int, int], shared: int) -> torch.device:
        for cache in caches:
            cache.cache_clear()
        given.update(capability=capability, properties=SimpleNamespace(shared_memory_per_block_optin=shared))
        return torch.device("cuda", 0)

    with (
        patch.dict("os.environ", {"TRITON_INTERPRET": "0"}),
        patch.object(torch.cuda, "get_device_capability", lambda device: given["capability"]),
        patch.object(torch.cuda, "get_device_name", lambda device: "Made Up"),
        patch.object(torch.cuda, "get_device_properties", lambda device: given["properties"]),
    ):
        yield pretend
    for cache in caches:
        cache.cache_clear()
