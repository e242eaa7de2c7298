"""A cache of the schedules of recent dense calls (calls without cu_seqlens).

For a short attention call, the host needs longer to build a schedule than the GPU needs for attention.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from fa_kernels.torch_private import current_stream_address, may_be_traced

# A schedule is cached only if its queries and keys are at most MAX_TOKENS in total. For larger batches, attention takes
# the GPU longer than the host needs to build a schedule.
MAX_TOKENS = 2**18
MAX_SCHEDULES = 8

_T = TypeVar("_T")
_CACHED: dict[Hashable, Any] = {}  # schedules by the arguments of a call; the oldest schedule comes first


def device_and_stream(device: torch.device | int) -> tuple[torch.device | int, int] | None:
    """Returns the device and its current stream, or None if new tensors must not be kept for later calls.

    `device` is a torch.device or the index of a CUDA device. The stream is given as its address, or as 0 if the device
    is not CUDA.
    """
    # Tensors that are created during a trace, a dispatch mode or a functorch transform may be unusable afterwards.
    if torch.compiler.is_compiling() or may_be_traced():
        return None
    if isinstance(device, torch.device) and device.type == "cuda":
        # The result has the device's index, because set_device changes the meaning of `cuda` without an index. The
        # stream's address does not identify the device, because the default stream of every device has the address 0.
        device = torch.cuda.current_device() if device.index is None else device.index
    if not isinstance(device, int):
        return device, 0
    # A captured CUDA graph owns the tensors that it creates, so the cache must not keep them. A graph must not read
    # cached tensors, because the cache may drop a tensor before the graph is replayed.
    if torch.cuda.is_current_stream_capturing():
        return None
    # The returned tuple contains the stream, because a kernel on another stream could read a cached tensor before this
    # stream has written the tensor.
    return device, current_stream_address(device)


def find_or_build(
    build: Callable[[int, int, int, torch.device | int, bool, tuple[int, int]], _T],
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | int,
    causal: bool,
    window_size: tuple[int, int],
) -> _T:
    """Returns the cached schedule of a dense call. If none is cached, builds it, and caches it if possible.

    `build` is called with the other arguments. `device` is a torch.device or the index of a CUDA device.
    """
    where = device_and_stream(device)
    if where is None or batch * (seqlen_q + seqlen_k) > MAX_TOKENS:
        return build(batch, seqlen_q, seqlen_k, device, causal, window_size)
    key = batch, seqlen_q, seqlen_k, causal, window_size, where
    value: _T | None = _CACHED.get(key)
    if value is None:
        with torch.inference_mode(False):  # autograd cannot save tensors that were created in inference mode
            value = build(batch, seqlen_q, seqlen_k, device, causal, window_size)
        if len(_CACHED) >= MAX_SCHEDULES:
            oldest, *_ = _CACHED
            _CACHED.pop(oldest, None)  # the default None avoids a KeyError if another thread has removed the key
        _CACHED[key] = value
    return value
