"""TMA descriptors of packed tensors. A descriptor is built once for each address and shape, and then cached."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa_kernels.columns_of_head import split_columns

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Address(NamedTuple):
    """The address and dtype of a tensor. A cached descriptor holds no tensor, so the tensor can be freed."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def rows_of_heads(x: Tensor, block: int) -> TensorDescriptor:
    """Returns a TMA descriptor of x for loads and stores of `block` tokens of one head.

    The coordinates of a load or store are (token, head * x.stride(1)). Loaded elements outside of x are 0.
    Shapes: x (total, heads, head_dim). `loadable(x)` must be True.
    """
    return _rows_of_heads(x.data_ptr(), x.dtype, x.shape, x.stride(), block)


def columns_of_heads(
    *operands: tuple[Tensor, int],
) -> tuple[list[TensorDescriptor], list[TensorDescriptor] | list[None]]:
    """Returns two lists of TMA descriptors. Each list has one entry per operand.

    The first list is for the first column block of each head, and the second list is for the second column block. If
    heads have only one column block, all entries of the second list are None.
    An operand is a pair (x, block) of arguments for `rows_of_heads`.
    """
    first, rest = split_columns(operands[0][0].shape[-1])
    if not rest:  # slicing x would cost host time
        return [rows_of_heads(x, block) for x, block in operands], [None] * len(operands)
    columns = slice(None, first), slice(first, None)
    of_first, of_second = ([rows_of_heads(x[..., some], block) for x, block in operands] for some in columns)
    return of_first, of_second


def elements(x: Tensor, block: int) -> TensorDescriptor:
    """Returns a TMA descriptor for loads of `block` consecutive elements of x. x must be contiguous.

    Loaded elements outside of x are 0.
    """
    return _descriptor(x.data_ptr(), x.dtype, (x.numel(),), (1,), (block,))


def loadable(x: Tensor) -> bool:
    """Returns whether TMA can read x (total, heads, head_dim) in place.

    The address and the strides must be multiples of 16 bytes. The last dimension must have stride 1. In memory, all
    heads of a token must come before the heads of the next token.
    """
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


# In training, tensors have the same addresses as in earlier steps. Building a descriptor takes 14 times as long as a
# cache hit.
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
