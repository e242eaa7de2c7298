"""Triton's private launcher: what record.py needs to launch a compiled kernel again without Triton's own search for it.

What is used of Triton: that a launch returns its CompiledKernel; that `driver.active.launcher_cls(source, metadata)`
makes what CompiledKernel.run calls, with these first nine arguments; what that hands on to its `launch` (`prepared`);
and make_tensordesc_arg, which encodes a descriptor for TMA. Triton does so at each launch; here each is encoded once
for each address, and the launcher is made for a signature that has, in a descriptor's place, what Triton expands it to.
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


def is_observed() -> bool:
    """Whether someone wants to be told of each launch, or changes how kernels are compiled."""
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
    """What TMA takes for a descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg  # only where there is a driver

    return make_tensordesc_arg(descriptor, encoding)[0]


class _Source(NamedTuple):
    """What a launcher is made for: the types of a kernel's arguments, by index."""

    signature: dict[int, Any]
    constants: dict[Any, Any]


def prepared(compiled: Any, grid: tuple[int, ...], stream: int) -> Callable[..., None]:
    """What launches the kernel with no more than its arguments. No hooks: `is_observed`."""
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


@cache  # one kernel is of many kinds, and Triton 3.6 loads a library for each launcher
def _launcher(compiled: Any) -> Any:
    """compiled.run, but for kernels whose descriptors are already what Triton makes of them at each launch."""
    types: list[Any] = []
    for kind in compiled.src.signature.values():
        rank = _rank(kind)
        types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank] if rank else [kind]
    if len(types) == len(compiled.src.signature):
        return compiled.run
    source = _Source(dict(enumerate(types)), {})
    return driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))


def _rank(kind: Any) -> int:
    """Of a descriptor, by its type; 0 is none. A type is `tensordesc<bf16[64, 128], layout>`."""
    match = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind) if isinstance(kind, str) else None
    return match[1].count(",") + 1 if match else 0
