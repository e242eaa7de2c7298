"""TMA descriptors of packed tensors, built once for each address and shape."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Address(NamedTuple):
    """What a descriptor needs of its tensor; a cached descriptor must not keep the tensor itself alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def describe(x: Tensor, block: int) -> TensorDescriptor:
    """Blocks of `block` tokens of one head, for load_rows and store_rows; as wide as `padded_width`.

    Shapes: x (total, heads, head_dim), which `loadable` must have taken.
    """
    heads_first = x.shape[2] != padded_width(x.shape[2])
    return _describe(x.data_ptr(), x.dtype, x.shape, x.stride(), block, heads_first)


def padded_width(head_dim: int) -> int:
    """Columns of a block in shared memory: the power of two that Triton's tensors must have."""
    return 1 << (head_dim - 1).bit_length()


def rows_of_heads(x: Tensor, block: int) -> TensorDescriptor:
    """Reads or writes `block` tokens of one head at (token, head * x.stride(1)); outside of x reads zero.

    Shapes: x (total, heads, head_dim), which `loadable` must have taken.
    """
    return _describe(x.data_ptr(), x.dtype, x.shape, x.stride(), block, False)


def heads_of_rows(x: Tensor, block: int) -> TensorDescriptor:
    """As rows_of_heads, at (head, token, 0), in blocks of `padded_width` columns.

    The head is a dimension of its own, so that columns past head_dim are outside of x, not the next head's: they read
    zero, which adds nothing to a product, and are not written.
    """
    return _describe(x.data_ptr(), x.dtype, x.shape, x.stride(), block, True)


def numbers(x: Tensor, block: int) -> TensorDescriptor:
    """Reads `block` numbers at an index into x, dense and taken as one vector; outside of x reads zero."""
    return _descriptor(x.data_ptr(), x.dtype, (x.numel(),), (1,), (block,))


@cache  # each call asks two times
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is an sm_90."""
    return torch.cuda.get_device_capability(device) == (9, 0)


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


@gluon.jit
def load_rows(descriptor, row, head, stride, barrier, buffer):
    """Starts to load rows of a head into buffer [rows, columns]; stride is x.stride(1) of the tensor described."""
    if len(descriptor.block_type.shape) == 3:
        shape: gl.constexpr = descriptor.block_type.shape
        block = buffer._reinterpret(descriptor.dtype, shape, descriptor.layout)
        tma.async_copy_global_to_shared(descriptor, [head, row, 0], barrier, block)
    else:
        tma.async_copy_global_to_shared(descriptor, [row, head * stride], barrier, buffer)


@gluon.jit
def store_rows(descriptor, row, head, stride, buffer):
    """Starts to store buffer [rows, columns] to rows of a head; tma.store_wait waits for it."""
    if len(descriptor.block_type.shape) == 3:
        shape: gl.constexpr = descriptor.block_type.shape
        block = buffer._reinterpret(descriptor.dtype, shape, descriptor.layout)
        tma.async_copy_shared_to_global(descriptor, [head, row, 0], block)
    else:
        tma.async_copy_shared_to_global(descriptor, [row, head * stride], buffer)


# A training step asks for the same addresses again and again. On a core where a forward call takes 100 us, a descriptor
# is found in 0.7 us, and built in 10, of which its layout is 7.
@lru_cache(maxsize=4096)
def _describe(
    pointer: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], block: int, heads_first: bool
) -> TensorDescriptor:
    total, heads, head_dim = shape
    stride_t, stride_h, _ = strides
    if heads_first:
        sizes, steps = (heads, total, head_dim), (stride_h, stride_t, 1)
        return _descriptor(pointer, dtype, sizes, steps, (1, block, padded_width(head_dim)))
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
