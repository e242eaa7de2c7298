"""Initial values of parameters.

A parameter's values depend on the seed and the parameter's name, not on the number of ranks.
Parameters are drawn one after another, each as a whole tensor in fp32 and from a separate generator. If a parameter is
sharded, each rank keeps only its own rows of the tensor. The values are rounded to the parameter's dtype. CPUs and GPUs
draw different values from the same seed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
_DRAWN_ON: ContextVar[torch.device | None] = ContextVar("drawn_on", default=None)


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Makes `device` draw all values, including the values of parameters on other devices."""
    token = _DRAWN_ON.set(device)
    try:
        yield
    finally:
        _DRAWN_ON.reset(token)


@torch.no_grad()
def initialise(parameter: Tensor, distribution: Distribution, seed: int, name: str) -> None:
    """Fills a parameter. If the parameter is sharded, fills only this rank's rows."""
    own, rows = own_rows(parameter)
    if isinstance(distribution, Constant):
        own.fill_(distribution.value)
        return
    device = drawing_device(own)
    if own.shape == parameter.shape and own.device == device and own.dtype == torch.float32 and own.is_contiguous():
        _draw_into(own, distribution, seed, name)
    else:
        own.copy_(drawn(distribution, parameter.shape, device, seed, name)[rows])


def drawn(distribution: Distribution, shape: Sequence[int], device: torch.device, seed: int, name: str) -> Tensor:
    """Returns the initial values of a whole parameter, in fp32."""
    x = torch.empty(shape, dtype=torch.float32, device=device)
    _draw_into(x, distribution, seed, name)
    return x


def drawing_device(parameter: Tensor) -> torch.device:
    """Returns the device that draws a parameter's values.

    Inside `with drawn_on(device)`, the result is `device` if `device` and the parameter's device differ in type, such
    as "cpu" and "cuda". In all other cases, the result is the parameter's device.
    """
    other = _DRAWN_ON.get()
    return parameter.device if other is None or other.type == parameter.device.type else other


def _draw_into(x: Tensor, distribution: Distribution, seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(digest[:8], "little"))
    match distribution:
        case Normal(std):
            x.normal_(std=std, generator=generator)
        case Uniform(bound):
            x.uniform_(-bound, bound, generator=generator)
        case Constant(value):
            x.fill_(value)
