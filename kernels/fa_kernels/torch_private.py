"""torch's private names that save attention host time, each with a slower fallback that uses public names only.

No other module of this package uses a private name of torch. If a torch lacks one, calls are slower but still right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def _find(path: str) -> Any:
    """The object torch.`path`, or None if there is none."""
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

# (shape, strides, dtype) -> a tensor on the current CUDA device, in half of torch.empty_strided's host time; or None
empty_strided_cuda: Callable[..., Tensor] | None = _find("_C._dynamo.guards._empty_strided_cuda")


def may_have_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is active; also True if this torch cannot tell."""
    return _dispatch_modes is None or bool(_dispatch_modes())


def may_be_watched() -> bool:
    """Whether a mode, a functorch transform, a trace or a profiler is active; also True if this torch cannot tell."""
    return not _KNOWS_WATCHERS or bool(
        _dispatch_modes()
        or _has_function_mode()
        or _transform_level() is not None
        or _tracing_state() is not None
        or _profiles()
    )


def may_have_tangents() -> bool:
    """Whether forward-mode differentiation is active; also True if this torch cannot tell."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def current_stream_address(device: int) -> int:
    """The address of a CUDA device's current stream."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    address: int = _raw_stream(device)
    return address


def apply_without_transforms(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` minus the functorch layer (2.5 of 8 us), which is not needed when no transform is active.

    Tensor arguments must have passed `without_dead_wrapper`.
    """
    direct = getattr(super(Function, function), "apply", None)
    return function.apply if direct is None or _unwrap_if_dead is None else direct


def without_dead_wrapper(x: Tensor) -> Tensor:
    """x without the wrapper that a functorch transform may have left on it after it ended."""
    if _unwrap_if_dead is None:
        return x  # function.apply does it
    unwrapped: Tensor = _unwrap_if_dead(x)
    return unwrapped


try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Stands in for torch's class; entering it fails."""

        def __enter__(self) -> Any:
            raise ImportError(f"TorchDispatchMode is missing from torch {torch.__version__}; install torch 2.13")

        def __exit__(self, *exception: object) -> None: ...
