"""Launches a compiled kernel by Triton's private launcher, without the work that Triton repeats at each launch.

This module relies on these details of Triton:
- A launch returns its CompiledKernel.
- `driver.active.launcher_cls(source, metadata)` makes the launcher that CompiledKernel.run calls. Its first nine
  arguments, and what it passes to its own `launch`, are those in `prepared`.
- make_tensordesc_arg encodes a descriptor for TMA. Triton encodes it at each launch; record.py keeps one encoding for
  each address. The launcher is therefore made for a signature in which each descriptor is expanded.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KNOWN_TRITON = ("3.6.0", "3.7.0", "3.7.1")  # the tested versions; launchers of others may take other arguments


def is_known() -> bool:
    """Whether this version of Triton was tested."""
    return triton.__version__ in KNOWN_TRITON


def current_device() -> int:
    """The index of the GPU that Triton launches on."""
    return driver.active.get_current_device()


def current_stream(device: int) -> int:
    """The handle of the stream that Triton launches on."""
    return driver.active.get_current_stream(device)


def has_launch_hooks() -> bool:
    """Whether a tool has hooks on launches or on compilation."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))  # a chain of hooks may be empty
        or (leave is not None and getattr(leave, "calls", True))
        or runtime.add_stages_inspection_hook is not None
        or runtime.debug
    )


def launches_plainly(kernel: Any) -> bool:
    """Whether a launch of `kernel` runs nothing but its code: no autotuner, no hook."""
    return isinstance(kernel, JITFunction) and not kernel.pre_run_hooks


def encodings_of(compiled: Any) -> Sequence[Any]:
    """How each descriptor among a compiled kernel's arguments is encoded, in their order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or []


def encoded(descriptor: TensorDescriptor, encoding: Any) -> Any:
    """A descriptor in the form that TMA takes."""
    from triton.backends.nvidia.driver import make_tensordesc_arg  # only where there is a driver

    return make_tensordesc_arg(descriptor, encoding)[0]


class _Source(NamedTuple):
    """What Triton makes a launcher from: the types of a kernel's arguments, by index."""

    signature: dict[int, Any]
    constants: dict[Any, Any]


def prepared(compiled: Any, grid: tuple[int, ...], stream: int) -> Callable[..., None]:
    """A function that launches the kernel with its arguments alone. It calls no hooks: see `has_launch_hooks`."""
    launcher = _launcher(compiled)
    where, how = (*grid, stream, compiled.function), (compiled.packed_metadata, None, None, None)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return partial(launcher, *where, *how)
    # without such memory the launcher adds constants, in 1 us
    where += launcher.launch_cooperative_grid, launcher.launch_pdl
    launch, no_scratch = launcher.launch, (None, None)
    if triton.__version__.startswith("3.6."):
        return partial(launch, *where, *no_scratch, *how)
    constants = *where, *how, *no_scratch, launcher.arg_annotations, launcher.kernel_signature
    return lambda *arguments: launch(*constants, arguments)


@cache  # many keys share a kernel, and Triton 3.6 loads a library for each launcher
def _launcher(compiled: Any) -> Any:
    """compiled.run, or a launcher that takes descriptors in their encoded form."""
    types: list[Any] = []
    for argument_type in compiled.src.signature.values():
        rank = _rank(argument_type)
        types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank] if rank else [argument_type]
    if len(types) == len(compiled.src.signature):
        return compiled.run
    source = _Source(dict(enumerate(types)), {})
    return driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))


def _rank(argument_type: Any) -> int:
    """The rank of a descriptor, from a type such as `tensordesc<bf16[64, 128], layout>`; 0 for other types."""
    match = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", argument_type) if isinstance(argument_type, str) else None
    return match[1].count(",") + 1 if match else 0
