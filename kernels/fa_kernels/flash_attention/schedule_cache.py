"""Keeps the schedules of the last dense calls: building one takes the host longer than a short attention call."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from fa_kernels.torch_private import current_stream_address, may_have_dispatch_mode

MAX_TOKENS = (
    2**18
)  # queries and keys of a call whose schedule is kept: at most 8 bytes each. Longer calls hide the cost
MAX_SCHEDULES = 8

_T = TypeVar("_T")
_KEPT: dict[Hashable, Any] = {}  # by `key_of`, the oldest first


def key_of(
    batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | int, causal: bool, window_size: tuple[int, int]
) -> Hashable:
    """The key of a dense call, or None if its schedule may not be kept. `device` may be the index of a CUDA device."""
    if (
        torch.compiler.is_compiling()
        or may_have_dispatch_mode()  # tensors may be fake, or the mode counts them
        or batch * (seqlen_q + seqlen_k) > MAX_TOKENS
    ):
        return None
    if isinstance(device, torch.device) and device.type == "cuda":
        # `cuda` means another device after set_device, and the default stream of each device is 0
        device = torch.cuda.current_device() if device.index is None else device.index
    stream = 0
    if isinstance(device, int):
        # what a graph captures lives in the graph's memory, and what a graph reads must live as long as the graph
        if torch.cuda.is_current_stream_capturing():
            return None
        # another stream might read a schedule before it is written
        stream = current_stream_address(device)
    return batch, seqlen_q, seqlen_k, device, causal, window_size, stream


def find(key: Hashable) -> Any | None:
    """The value that is kept under `key`, or None."""
    return _KEPT.get(key)


def find_or_build(key: Hashable, build: Callable[[], _T]) -> _T:
    """The value that is kept under `key`, or build(), which is then kept."""
    value: _T | None = _KEPT.get(key)
    if value is None:
        with torch.inference_mode(False):  # autograd cannot save tensors that inference mode made
            value = build()
        if len(_KEPT) >= MAX_SCHEDULES:
            oldest, *_ = _KEPT
            _KEPT.pop(oldest, None)  # another thread may have removed it
        _KEPT[key] = value
    return value
