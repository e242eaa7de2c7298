"""Weights in host memory with the random numbers of a GPU, so that a seed gives a sharded model a whole one's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_kernels.torch_private import TorchDispatchMode


class DrawnOn(TorchDispatchMode):
    """What is drawn in place, as torch.nn.init draws, is drawn on `device` and copied to where the tensor lies.

    A seed gives each kind of device other numbers. The device holds one tensor at a time, and draws the 8B of llama_8b
    in seconds, where one core of a CPU takes minutes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        drawn_in_place = torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__.endswith("_")
        if not drawn_in_place or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        target: Tensor = args[0]
        drawn = torch.empty_like(target, device=self.device, memory_format=torch.contiguous_format)
        return target.copy_(func(drawn, *args[1:], **(kwargs or {})))
