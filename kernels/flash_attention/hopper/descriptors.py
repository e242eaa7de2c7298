"""TMA descriptors of packed tensors, built once for each address and shape."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class _Address(NamedTuple):
    """What a descriptor needs of its tensor; a cached descriptor must not keep the tensor itself alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def rows_of_heads(x: Tensor, block: int) -> TensorDescriptor:
    """Reads or writes `block` tokens of one head at (token, head * x.stride(1)); outside of x reads zero.

    Shapes: x (total, heads, head_dim), which `loadable` must have taken.
    """
    total, heads, head_dim = x.shape
    return _descriptor(x.data_ptr(), x.dtype, total, (heads - 1) * x.stride(1) + head_dim, x.stride(0), block, head_dim)


def loadable(x: Tensor) -> bool:
    """Whether TMA can read (total, heads, head_dim) in place: 16-byte steps, the heads within their token's row."""
    step = 16 // x.element_size()
    return (
        x.numel() > 0
        and x.stride(2) == 1
        and x.stride(0) % step == 0
        and x.stride(1) % step == 0
        and x.data_ptr() % 16 == 0
        and x.stride(0) >= (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    )


@lru_cache(maxsize=4096)
def _descriptor(
    pointer: int, dtype: torch.dtype, rows: int, width: int, stride: int, block: int, head_dim: int
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([block, head_dim], _ELEMENT[dtype])
    return TensorDescriptor(_Address(pointer, dtype), [rows, width], [stride, 1], [block, head_dim], layout)
