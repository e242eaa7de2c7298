"""Random initial values of parameters.

A parameter's values depend on the seed and the parameter's name, not on the number of ranks.
Parameters are drawn one after another, each as a whole tensor in fp32 and from a separate generator. If a parameter is
sharded, each rank keeps only its own rows of the tensor. The values are rounded to the parameter's dtype. CPUs and GPUs
draw different values from the same seed.
"""

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from fa_train.models.shards import own_rows


class Fill(Protocol):
    """A function that fills a tensor with random values and returns the tensor, such as torch.nn.init.normal_."""

    def __call__(self, tensor: Tensor, *, generator: torch.Generator) -> Tensor: ...


@torch.no_grad()
def draw(parameter: Tensor, fill: Fill, seed: int, name: str) -> None:
    """Fills a parameter with random values. If the parameter is sharded, fills only this rank's rows."""
    own, rows = own_rows(parameter)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(own.device).manual_seed(int.from_bytes(digest[:8], "little"))
    if own.shape == parameter.shape and own.dtype == torch.float32 and own.is_contiguous():
        fill(own, generator=generator)
    else:
        x = torch.empty(parameter.shape, dtype=torch.float32, device=own.device)
        own.copy_(fill(x, generator=generator)[rows])
