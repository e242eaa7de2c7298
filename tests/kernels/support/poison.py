"""Fills uninitialised memory with NaN, so that a test finds output elements that a kernel does not write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from fa_kernels import torch_private

RECORDER = "fa_kernels.launch.record"  # the recorder of this module must not see the operators that fill memory


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty and similar functions return memory full of NaN, True or the largest integer.

    torch.use_deterministic_algorithms also fills memory, but it changes which kernels torch runs.
    """
    # When a program first enters a torch.device context, torch caches the functions that create tensors. This context
    # comes before the patches, so torch caches the unpatched functions.
    with torch.device("meta"):
        torch.empty(0)
    patches = [
        patch.object(owner, name, _poisoned(getattr(owner, name)))
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (Tensor, ("new_empty", "new_empty_strided")),
            (torch_private, ("empty_strided_cuda",)),  # launch/record.py allocates with empty_strided_cuda
        )
        for name in names
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_meta or isinstance(tensor, FakeTensor):  # has no memory
            return tensor
        recorded = type(_get_current_dispatch_mode()).__module__ == RECORDER
        with torch.no_grad(), _pop_mode_temporarily() if recorded else nullcontext():
            return tensor.fill_(_poison(tensor.dtype))

    return allocate_and_fill


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
