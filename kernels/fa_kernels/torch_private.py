"""Private functions of torch that reduce the host time of attention calls.

No other module of this package uses private names of torch. The versions of torch that pyproject.toml allows have these
names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_transform_level = torch._C._functorch.maybe_current_level
_tracing_state = torch._C._get_tracing_state
_profiles = torch.autograd._profiler_enabled
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None if torch was built without CUDA

_guards: Any = torch._C._dynamo.guards  # Any, because torch's type stub lacks the function
# empty_strided_cuda(shape, strides, dtype) allocates on the current CUDA device, in half the host time of
# torch.empty_strided.
empty_strided_cuda: Callable[..., Tensor] = _guards._empty_strided_cuda

# without_dead_wrapper(x) returns x without the wrapper of a functorch transform that has ended, or x itself if x has no
# such wrapper.
without_dead_wrapper: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def may_be_watched() -> bool:
    """Returns whether a torch mode, a functorch transform, a trace or a profiler is active."""
    return may_be_traced() or bool(_has_function_mode() or _profiles())


def may_be_traced() -> bool:
    """Returns whether a TorchDispatchMode, a functorch transform or a trace is active.

    While a TorchDispatchMode, a functorch transform or a trace is active, tensors may have no data.
    """
    return bool(_dispatch_modes() or _transform_level() is not None or _tracing_state() is not None)


def may_have_tangents() -> bool:
    """Returns whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def current_stream_address(device: int) -> int:
    """Returns the address (the handle) of the current stream of a CUDA device."""
    address: int = _raw_stream(device)
    return address


def apply_without_transforms(function: type[Function]) -> Callable[..., Any]:
    """Returns `function.apply` without its functorch layer.

    `function.apply` takes 8 us of host time, including 2.5 us for the functorch layer. The functorch layer is not
    needed while no functorch transform is active. Call `without_dead_wrapper` on each tensor argument first. From
    torch 2.14 on, `function.apply` has no such layer in Python, and this function returns `function.apply`.
    """
    bases: Any = super(Function, function)  # Any, because torch's type stub does not list the method of the base
    apply: Callable[..., Any] = bases.apply
    return apply
