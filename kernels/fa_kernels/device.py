"""Properties of the GPU that kernels run on, and constants and helpers that several kernels use."""

import os
from functools import cache
from typing import Any, Literal

import torch
import triton.language as tl

Arch = Literal["interpreter", "sm80", "sm90", "sm100", "unknown"]

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)  # log(x) is log2(x) * LN_2
# Each GPU uses the tile sizes of one architecture. sm_89 uses the tile sizes of sm80, and so does consumer Blackwell
# (12.x), which has the instructions and the shared memory of sm_89.
_ARCHITECTURES: dict[tuple[int, int], Arch] = {
    (8, 0): "sm80",
    (8, 6): "sm80",
    (8, 7): "sm80",
    (8, 9): "sm80",
    (9, 0): "sm90",
    (10, 0): "sm100",
    (10, 3): "sm100",
    (12, 0): "sm80",
    (12, 1): "sm80",
}


def interpreted() -> bool:
    """Returns whether kernels run in Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def arch_of(device: torch.device) -> Arch:
    """Returns the name of the architecture whose tile sizes a device uses."""
    if interpreted():
        return "interpreter"
    return _ARCHITECTURES.get(torch.cuda.get_device_capability(device), "unknown")


@cache  # cached, because the forward and the backward pass of attention call is_hopper
def is_hopper(device: torch.device) -> bool:
    """Returns whether a CUDA device is an sm_90."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache  # cached, because several kernels of an attention call need the number of multiprocessors
def multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Returns the most bytes of shared memory that a program can use on a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)  # Any, because torch's type stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up. triton.cdiv computes the same number, but takes 2 us of host time."""
    return -(-a // b)
