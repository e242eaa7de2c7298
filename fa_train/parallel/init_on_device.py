"""Initialises weights in CPU memory with random numbers that a GPU draws.

A sharded run, whose weights are initialised in CPU memory, then starts with the same weights as an unsharded run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_kernels.torch_private import TorchDispatchMode


class InitOnDevice(TorchDispatchMode):
    """A mode in which in-place random functions, such as those in torch.nn.init, draw their values on `device`.

    The mode then copies the drawn values to the tensor. CPUs and GPUs draw different values from the same seed. The
    device holds one tensor at a time. A GPU draws the weights of llama_8b in seconds. One CPU core needs minutes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        random_in_place = torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__.endswith("_")
        if not random_in_place or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        target: Tensor = args[0]
        drawn = torch.empty_like(target, device=self.device, memory_format=torch.contiguous_format)
        return target.copy_(func(drawn, *args[1:], **(kwargs or {})))
