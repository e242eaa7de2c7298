"""Private functions of torch that reduce the host time of attention calls.

No other module of this package uses private names of torch. Each function of this module has a slower fallback that
uses public names only. If a version of torch lacks a private name, calls are slower, but their results are the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def _find(path: str) -> Any:
    """Returns the attribute of torch with the dotted name `path`, or None if torch lacks this attribute."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_dispatch_modes = _find("_C._len_torch_dispatch_stack")
_has_function_mode = _find("_C._is_torch_function_mode_enabled")
_transform_level = _find("_C._functorch.maybe_current_level")
_tracing_state = _find("_C._get_tracing_state")
_profiles = _find("autograd._profiler_enabled")
_raw_stream = _find("_C._cuda_getCurrentRawStream")
_unwrap_if_dead = _find("_C._functorch.unwrap_if_dead")
_KNOWS_WATCHERS = None not in (_dispatch_modes, _has_function_mode, _transform_level, _tracing_state, _profiles)

# empty_strided_cuda(shape, strides, dtype) allocates on the current CUDA device, in half the host time of
# torch.empty_strided. empty_strided_cuda is None if torch does not have the function.
empty_strided_cuda: Callable[..., Tensor] | None = _find("_C._dynamo.guards._empty_strided_cuda")


def may_be_watched() -> bool:
    """Returns True if a torch mode, a functorch transform, a trace or a profiler is active, or if torch cannot tell."""
    return may_be_traced() or bool(_has_function_mode() or _profiles())


def may_be_traced() -> bool:
    """Returns True if a TorchDispatchMode, a functorch transform or a trace is active, or if torch cannot tell.

    While a TorchDispatchMode, a functorch transform or a trace is active, tensors may have no data.
    """
    return not _KNOWS_WATCHERS or bool(
        _dispatch_modes() or _transform_level() is not None or _tracing_state() is not None
    )


def may_have_tangents() -> bool:
    """Returns whether forward-mode differentiation is active, or True if this version of torch cannot tell."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def current_stream_address(device: int) -> int:
    """Returns the address (the handle) of the current stream of a CUDA device."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    address: int = _raw_stream(device)
    return address


def apply_without_transforms(function: type[Function]) -> Callable[..., Any]:
    """Returns `function.apply` without its functorch layer.

    `function.apply` takes 8 us of host time, including 2.5 us for the functorch layer. The functorch layer is not
    needed while no functorch transform is active. Call `without_dead_wrapper` on each tensor argument first. From
    torch 2.14 on, `function.apply` has no such layer in Python, and this function returns `function.apply`.
    """
    direct = getattr(super(Function, function), "apply", None)
    return function.apply if direct is None or _unwrap_if_dead is None else direct


def without_dead_wrapper(x: Tensor) -> Tensor:
    """Returns x without the wrapper of a functorch transform that has ended, or x itself if x has no such wrapper."""
    if _unwrap_if_dead is None:
        return x  # without _unwrap_if_dead, the caller uses function.apply, which unwraps x itself
    unwrapped: Tensor = _unwrap_if_dead(x)
    return unwrapped


try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Replaces TorchDispatchMode if torch lacks this class. `with TorchDispatchMode()` raises ImportError."""

        def __enter__(self) -> Any:
            raise ImportError(f"TorchDispatchMode is missing from torch {torch.__version__}; install torch 2.14")

        def __exit__(self, *exception: object) -> None: ...
