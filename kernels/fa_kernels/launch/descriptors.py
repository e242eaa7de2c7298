"""TMA descriptors of packed tensors, built once for each address and shape."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa_kernels.columns_of_head import split_columns

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Address(NamedTuple):
    """What a descriptor needs of its tensor; a cached descriptor must not keep the tensor itself alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def rows_of_heads(x: Tensor, block: int) -> TensorDescriptor:
    """Reads or writes `block` tokens of one head at (token, head * x.stride(1)); outside of x reads zero.

    Shapes: x (total, heads, head_dim), which `loadable` must have taken.
    """
    return _rows_of_heads(x.data_ptr(), x.dtype, x.shape, x.stride(), block)


def columns_of_heads(
    *operands: tuple[Tensor, int],
) -> tuple[list[TensorDescriptor], list[TensorDescriptor] | list[None]]:
    """rows_of_heads of each (x, block): of a head's first columns, and of the rest, None where it is worked as one."""
    first, rest = split_columns(operands[0][0].shape[-1])
    if not rest:  # views of columns cost the host time
        return [rows_of_heads(x, block) for x, block in operands], [None] * len(operands)
    head, tail = slice(None, first), slice(first, None)
    whole, others = ([rows_of_heads(x[..., part], block) for x, block in operands] for part in (head, tail))
    return whole, others


def elements(x: Tensor, block: int) -> TensorDescriptor:
    """Reads `block` elements from an index into x, which is dense and read as a vector; outside of x reads zero."""
    return _descriptor(x.data_ptr(), x.dtype, (x.numel(),), (1,), (block,))


def loadable(x: Tensor) -> bool:
    """Whether TMA can read (total, heads, head_dim) in place: 16-byte steps, the heads within their token's row."""
    _, heads, head_dim = x.shape
    stride_t, stride_h, stride_d = x.stride()
    step = 16 // x.element_size()
    return (
        stride_d == 1
        and stride_t % step == 0
        and stride_h % step == 0
        and stride_t >= (heads - 1) * stride_h + head_dim
        and x.data_ptr() % 16 == 0
        and x.numel() > 0
    )


# A training step asks for the same addresses again and again. On a core where a forward call takes 100 us, a descriptor
# is found in 0.7 us, and built in 10, of which its layout is 7.
@lru_cache(maxsize=4096)
def _rows_of_heads(
    pointer: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], block: int
) -> TensorDescriptor:
    total, heads, head_dim = shape
    stride_t, stride_h, _ = strides
    width = (heads - 1) * stride_h + head_dim
    return _descriptor(pointer, dtype, (total, width), (stride_t, 1), (block, head_dim))


@lru_cache(maxsize=4096)
def _descriptor(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    return TensorDescriptor(Address(pointer, dtype), [*shape], [*strides], [*block], _layout(block, dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([*block], _ELEMENT[dtype])
