"""Launches a compiled kernel with Triton's private launcher, without the work that Triton repeats at each launch.

This module relies on the following private details of Triton. A kernel launch returns its CompiledKernel.
CompiledKernel.run is a launcher. `driver.active.launcher_cls(source, metadata)` makes a new launcher. `prepared` binds
the first nine arguments of a launcher. If the kernel needs no scratch memory, `prepared` skips the launcher and calls
the function `launcher.launch` directly. `make_tensordesc_arg` encodes a descriptor for TMA. Triton encodes descriptors
at each launch, but record.py caches one encoding for each address. In place of a descriptor, a
launcher from `_launcher` accepts several arguments: the encoded descriptor, its sizes and its strides.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KNOWN_TRITON = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")  # tested versions; launchers of other versions may differ


def is_known() -> bool:
    """Returns whether this version of Triton was tested."""
    return triton.__version__ in KNOWN_TRITON


def current_device() -> int:
    """Returns the index of the GPU that Triton launches on."""
    return driver.active.get_current_device()


def current_stream(device: int) -> int:
    """Returns the handle of the stream that Triton launches on."""
    return driver.active.get_current_stream(device)


def has_launch_hooks() -> bool:
    """Returns whether Triton's debug mode or instrumentation is on, or a tool has installed hooks for launches or
    compilation.
    """
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))  # Triton's chain of hooks exists even if it is empty
        or (leave is not None and getattr(leave, "calls", True))
        or runtime.add_stages_inspection_hook is not None
        or runtime.debug
        or triton.knobs.compilation.instrumentation_mode
    )


def launches_plainly(kernel: Any) -> bool:
    """Returns whether a launch of `kernel` only runs the kernel, without an autotuner or a hook."""
    return isinstance(kernel, JITFunction) and not kernel.pre_run_hooks


def encodings_of(compiled: Any) -> Sequence[Any]:
    """Returns Triton's metadata for encoding descriptors, one entry per descriptor of a compiled kernel."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or []


def encoded(descriptor: TensorDescriptor, encoding: Any) -> Any:
    """Returns the TMA descriptor in the encoding that the GPU reads."""
    return _encoder()(descriptor, encoding)[0]


@cache
def _encoder() -> Callable[[TensorDescriptor, Any], Any]:
    """Returns Triton's function that encodes a descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg  # imported here because it needs a CUDA driver

    n_more = len(signature(make_tensordesc_arg).parameters) - 2
    if not n_more:
        return make_tensordesc_arg
    # from Triton 3.8 on, the function also takes the arguments of the launch, but does not use them
    return lambda descriptor, encoding: make_tensordesc_arg(descriptor, encoding, *[None] * n_more)


class _Source(NamedTuple):
    """The input of Triton's launcher class: the type of each kernel argument, by the argument's index."""

    signature: dict[int, Any]
    constants: dict[Any, Any]


def prepared(compiled: Any, grid: tuple[int, ...], stream: int) -> Callable[..., None]:
    """Returns a function that launches the kernel. The function accepts only the kernel's arguments.

    The function runs no launch hooks, so do not use the function if `has_launch_hooks()` is True.
    """
    launcher = _launcher(compiled)
    where, how = (*grid, stream, compiled.function), (compiled.packed_metadata, None, None, None)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return partial(launcher, *where, *how)
    # If a kernel needs no scratch memory, Triton's launcher only adds constant arguments, which takes 1 us per launch.
    # The returned function holds the constants, and calls `launcher.launch` directly.
    where += launcher.launch_cooperative_grid, launcher.launch_pdl
    launch, no_scratch = launcher.launch, (None, None)
    if triton.__version__.startswith("3.6."):
        return partial(launch, *where, *no_scratch, *how)
    constants = *where, *how, *no_scratch, launcher.arg_annotations, launcher.kernel_signature
    return lambda *arguments: launch(*constants, arguments)


@cache  # cached, because Triton 3.6 loads a library for each new launcher
def _launcher(compiled: Any) -> Any:
    """Returns a launcher that accepts encoded descriptors, or compiled.run if the kernel has no descriptors."""
    types: list[Any] = []
    for argument_type in compiled.src.signature.values():
        rank = _rank(argument_type)
        types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank] if rank else [argument_type]
    if len(types) == len(compiled.src.signature):
        return compiled.run
    source = _Source(dict(enumerate(types)), {})
    return driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))


def _rank(argument_type: Any) -> int:
    """Returns the rank of a descriptor type such as `tensordesc<bf16[64, 128], layout>`, or 0 for other types."""
    match = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", argument_type) if isinstance(argument_type, str) else None
    return match[1].count(",") + 1 if match else 0
