"""Initial values of parameters.

A parameter's values depend on the seed and the parameter's name, not on the number of ranks.
Parameters are drawn one after another, each as a whole tensor in fp32 and from a separate generator. If a parameter is
sharded, each rank keeps only its own rows of the tensor. The values are rounded to the parameter's dtype. CPUs and GPUs
draw different values from the same seed.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_train.models.shards import own_rows


@dataclass(frozen=True)
class Normal:
    """A normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution from -bound to bound."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """A constant, which becomes the value of all elements."""

    value: float


Distribution = Normal | Uniform | Constant


@torch.no_grad()
def initialise(parameter: Tensor, distribution: Distribution, seed: int, name: str) -> None:
    """Fills a parameter. If the parameter is sharded, fills only this rank's rows."""
    own, rows = own_rows(parameter)
    if isinstance(distribution, Constant):
        own.fill_(distribution.value)
        return
    if own.shape == parameter.shape and own.dtype == torch.float32 and own.is_contiguous():
        _draw_into(own, distribution, seed, name)
    else:
        x = torch.empty(parameter.shape, dtype=torch.float32, device=own.device)
        _draw_into(x, distribution, seed, name)
        own.copy_(x[rows])


def _draw_into(x: Tensor, distribution: Normal | Uniform, seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(digest[:8], "little"))
    match distribution:
        case Normal(std):
            x.normal_(std=std, generator=generator)
        case Uniform(bound):
            x.uniform_(-bound, bound, generator=generator)
