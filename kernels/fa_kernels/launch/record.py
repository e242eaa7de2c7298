"""Records the kernel launches of a call once, and repeats them for other tensors of the same shapes.

Repeating the recorded launches takes much less host time than a normal call. In a normal call, the host chooses kernels
and tiles, and Triton uses about 30 arguments to find the compiled kernel. The kernels and tiles depend only on shapes,
strides, dtypes and options, which form the call's key. Calls with the same key differ only in tensor addresses.

`recorded` decorates a function. When a key occurs for the second time, the call runs under a recorder. The recorder
notes each tensor that the call allocates, and the arguments of each `launch`. For each address in the arguments, the
recorder finds the tensor that the address belongs to. Later calls with the same key allocate tensors, insert the new
addresses and call the launchers of the compiled kernels directly.

A recording belongs to one key, one stream and one device. All calls run normally if a tool has installed launch hooks,
if this version of Triton is untested, or if FA_TRAIN_REPLAY=0. A call runs normally if its tensors are not on the
current GPU, or if an address is not a multiple of 16 bytes. Calls run normally during the capture of a CUDA graph,
because each graph needs its own work-queue counters. A call cannot be recorded if it runs a torch operator other than
torch.empty or a view, or if an address belongs to no known tensor. If recording fails, later calls with the same key
run normally. Keys do not contain module globals such as tile tables, so call `forget()` after changing such a global.
"""

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache, partial, wraps
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa_kernels import torch_private
from fa_kernels.launch.descriptors import Address
from fa_kernels.launch.triton_launcher import (
    current_device,
    current_stream,
    encoded,
    encodings_of,
    has_launch_hooks,
    is_known,
    launches_plainly,
    prepared,
)
from fa_kernels.options import OPTIONS

VARIABLE = "FA_TRAIN_REPLAY"  # environment variable, read at the first call (0 switches recording off)
MAX_KEYS = 512  # maximum number of keys in `_KEYS`; one more key removes all older keys, because many may be obsolete
MAX_DESCRIPTORS = 8192  # maximum number of cached TMA descriptors (0.5 KB each); a training step has up to 23 per layer
MAX_ARGUMENTS = 1024  # maximum number of cached argument lists (1 to 7 KB each); a training step has two per layer
ALIGNMENT = 16  # bytes; Triton compiles different code for addresses that are not a multiple of 16
# Temporary tensors up to this size share one allocation, as an allocation costs at least 1.4 us of host time. Kernels
# that use a temporary tensor of more than 16 MiB run for longer than the host needs to allocate the tensor.
SHARED_BYTES = 2**24
SLICE_ALIGNMENT = 512  # bytes, the alignment of allocations by torch

_Function = TypeVar("_Function", bound=Callable[..., tuple[Tensor, ...]])


class _Known(Enum):
    """The reason why `_KEYS` has no recording for a key that has occurred before."""

    SEEN_ONCE = "the key may never come again, so nothing is recorded yet"
    UNCLEAR = "its launches cannot be repeated"


class _Watched(threading.local):
    """The recording in progress in this thread. Threads record separately: autograd runs one thread per device."""

    recorder: "_Recorder | None" = None


_WATCHED = _Watched()
_KEYS: dict[Hashable, "_Recording | _Known"] = {}
_COMPILED: dict[Hashable, Any] = {}  # compiled kernels of launch_unspecialised, by (kernel, device, dtypes, constants)
_SAID = False  # whether a failure to record has been logged


def recorded(
    describe: Callable[..., tuple[tuple[Hashable, ...], Sequence[Tensor | None]]],
) -> Callable[[_Function], _Function]:
    """Decorates a function so that its launches are recorded, and repeated in later calls with the same key.

    The decorated function must accept positional arguments only, and its first argument must be a tensor. The function
    must return new tensors only.

    Args:
        describe: a function that gets the arguments of the decorated function and returns (key, inputs). The key must
            contain the shapes, strides, dtypes, devices and options that the launches depend on. The key does not have
            to contain addresses or the CUDA stream. `inputs` are all tensors that the decorated function reads.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(*arguments: Any) -> tuple[Tensor, ...]:
            stream = _recordable_stream(arguments[0])
            if stream is None:
                with torch.cuda.device_of(arguments[0]):  # Triton launches kernels on the current device
                    return function(*arguments)
            key, inputs = describe(*arguments)
            return _repeat_or_run((key, stream), inputs, function, arguments)

        return cast(_Function, call)

    return decorate


def _recordable_stream(x: Tensor) -> int | None:
    """Returns the current stream of x's GPU, or None if a call on x must not be recorded or repeated."""
    if not x.is_cuda or not _may_record():
        return None
    device = current_device()
    if device != x.get_device() or torch.cuda.is_current_stream_capturing() or has_launch_hooks():
        return None
    return current_stream(device)


def _repeat_or_run(
    key: tuple[tuple[Hashable, ...], int],
    inputs: Sequence[Tensor | None],
    function: Callable[..., tuple[Tensor, ...]],
    arguments: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Returns function(*arguments). If `key` has a recording, repeats the recorded launches instead."""
    known = _KEYS.get(key)
    failure = None
    try:
        if isinstance(known, _Recording):
            outputs = known.play([x.data_ptr() for x in known.read(inputs)])
            if outputs is not None:
                return outputs
        elif known is _Known.SEEN_ONCE and not any(x is not None and x.data_ptr() % ALIGNMENT for x in inputs):
            recorder = _Recorder(inputs)
            outputs = recorder.watch(function, arguments)
            _KEYS[key] = recorder.recording(outputs, stream=key[1])
            return outputs
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"  # only text, because the error itself would keep tensors alive
    if known is None:
        if len(_KEYS) >= MAX_KEYS:
            forget()
        _KEYS[key] = _Known.SEEN_ONCE
    outputs = function(*arguments)  # if `function` raised an error while it was recorded, it raises the error again
    if failure is not None:
        _KEYS[key] = _Known.UNCLEAR
        _say_once(failure)
    return outputs


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs kernel[grid](*arguments, **constants), and adds the launch to the recording in progress, if there is one."""
    compiled = kernel[grid](*arguments, **constants, **OPTIONS)
    if _WATCHED.recorder is not None:
        _WATCHED.recorder.note(kernel, grid, compiled, arguments, constants)


def launch_unspecialised(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel in less host time than `launch`.

    The kernel is compiled once for each combination of device, constants and dtypes. The same compiled kernel is
    launched with different grids and different int32 arguments. A recording keeps the grid and the int32 arguments of
    the recorded call. The first argument must be a tensor. Arguments that are numbers must be int32 and listed in
    do_not_specialize. Pointers must be aligned or listed in do_not_specialize_on_alignment.
    """
    stream = _recordable_stream(arguments[0])
    if stream is None or _WATCHED.recorder is not None:
        launch(kernel, grid, *arguments, **constants)
        return
    dtypes = [x.dtype for x in arguments if isinstance(x, Tensor)]
    key = id(kernel), arguments[0].get_device(), *dtypes, *constants.values()
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = kernel[grid](*arguments, **constants, **OPTIONS)
        if launches_plainly(kernel):
            _COMPILED[key] = compiled
        return
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    values += [constants[name] for name in kernel.arg_names[len(arguments) :]]
    prepared(compiled, (*grid, 1, 1)[:3], stream)(*values)


def lasting(x: Tensor) -> Tensor:
    """Returns x. While a call is recorded, `lasting` makes later calls use x itself, not a new tensor.

    Use `lasting` for tensors that are neither inputs nor new, such as the counter of a work queue.
    """
    recorder = _WATCHED.recorder
    if recorder is not None and all(x is not known for known in recorder.tensors):  # the recorder does not know x yet
        recorder.add(x, lambda: x)
    return x


def forget() -> None:
    """Removes all recordings.

    Call `forget` after changing a module global that recording keys do not contain, such as a tile table.
    """
    _KEYS.clear()
    _arguments.cache_clear()


@cache
def _may_record() -> bool:
    """Returns whether this version of Triton was tested and FA_TRAIN_REPLAY is not 0. Returns False on AMD GPUs.

    Raises: ValueError if FA_TRAIN_REPLAY is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1; got {wanted}")
    return wanted == "1" and torch.version.hip is None and is_known()


def _say_once(failure: str) -> None:
    """Logs the first failure of a recording. warnings.warn is not used, because users can turn warnings into errors."""
    global _SAID
    if not _SAID:
        _SAID = True
        logging.getLogger(__name__).warning(
            "attention could not record its kernel launches, so calls take more host time. "
            "%s=0 switches recording off. The cause was %s",
            VARIABLE,
            failure,
        )


class _Launch(NamedTuple):
    """One recorded kernel launch. `run` launches the kernel.

    The function `arguments` picks the kernel's arguments from a list of constants, addresses and TMA descriptors.
    """

    run: Callable[..., None]
    arguments: Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)  # hashed by identity, because a _Descriptor is an argument of a cached function
class _Descriptor:
    """A TMA descriptor whose address is filled in when the launch is repeated."""

    place: int  # index of the tensor's address in the list of addresses
    offset: int  # bytes from the start of the tensor; above 0 in a descriptor of the second column block of a head
    descriptor: TensorDescriptor
    encoding: Any  # Triton's encoding metadata for this argument of the kernel


@lru_cache(maxsize=MAX_DESCRIPTORS)
def _encoded(described: _Descriptor, address: int) -> Any:
    """Returns a TMA descriptor, encoded for the tensor at `address`."""
    base = Address(address + described.offset, described.descriptor.base.dtype)
    return encoded(replace(described.descriptor, base=base), described.encoding)


@dataclass(frozen=True, eq=False)
class _Recording:
    """The allocations and launches of a call. A recording keeps no tensors alive, except those passed to `lasting`.

    Lists of addresses have this order: inputs that launches read, allocations, slices of the last allocation.
    For example, a call with the inputs q, k and v allocates o and lse, and launches kernel(q, k, v, o, lse, 4096, 0.1).
    The recording has the constants [4096, 0.1]. A repeated call makes a list of the constants and the new addresses,
    [4096, 0.1, q, k, v, o, lse]. From this list, the launch picks the elements 2, 3, 4, 5, 6, 0 and 1.
    """

    read: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]  # returns the inputs that the recorded kernels read
    allocations: list[Callable[[], Tensor]]  # small temporary tensors are slices of the last allocation
    constants: list[Any]
    descriptors: list[_Descriptor]
    launches: list[_Launch]
    outputs: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # maps the allocated tensors to the call's outputs
    same: list[tuple[int, int]]  # (i, j): addresses i and j must be equal, as in the recorded call
    slices: list[tuple[int, int]]  # for each slice: (index of the allocation's address, offset in bytes)

    def play(self, addresses: list[int]) -> tuple[Tensor, ...] | None:
        """Repeats the launches for inputs at `addresses`, and returns the outputs.

        If the recording does not fit the addresses (see `_arguments`), launches nothing and returns None.
        """
        made = [allocate() for allocate in self.allocations]
        addresses += [x.data_ptr() for x in made]
        launches = _arguments(self, tuple(addresses))
        if launches is None:
            return None
        for run, arguments in launches:
            run(*arguments)
        return self.outputs(made)


@lru_cache(maxsize=MAX_ARGUMENTS)  # a training step uses the same addresses as the previous step
def _arguments(
    recording: _Recording, addresses: tuple[int, ...]
) -> list[tuple[Callable[..., None], tuple[Any, ...]]] | None:
    """Returns one pair (run, arguments) for each launch: run(*arguments) launches the kernel.

    Returns None if an address is not aligned, because Triton compiles a different kernel for such addresses. Returns
    None if two addresses that were equal in the recorded call are now different.
    """
    if any(address % ALIGNMENT for address in addresses):
        return None
    if any(addresses[one] != addresses[other] for one, other in recording.same):
        return None
    addresses += tuple([addresses[place] + offset for place, offset in recording.slices])
    descriptors = [_encoded(x, addresses[x.place]) for x in recording.descriptors]
    values = [*recording.constants, *addresses, *descriptors]
    return [(run, arguments(values)) for run, arguments in recording.launches]


class _Unclear(Exception):
    """Raised if a recorded call cannot be repeated with tensors at other addresses."""


class _Recorder(torch_private.TorchDispatchMode):
    """Records one call.

    The recorder keeps all tensors of the call alive, so that no two tensors get the same address.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors = [*inputs]
        self.n_inputs = len(inputs)
        self.clear = True
        self.allocations: list[Callable[[], Tensor]] = []
        self.temporary: list[int] = []  # indices in self.allocations of tensors from torch.empty; some may be outputs
        self.constants: list[Any] = []
        self.descriptors: list[_Descriptor] = []
        self.launches: list[tuple[Any, tuple[int, ...], list[tuple[str, int]]]] = []
        self.same: set[tuple[int, int]] = set()

    def watch(self, function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        _WATCHED.recorder = self
        try:
            with self:
                return function(*arguments)
        finally:
            _WATCHED.recorder = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.temporary.append(len(self.allocations))
            self.add(result, _allocation(result))
        elif not func.is_view:
            self.clear = False  # a recording repeats only allocations and launches, so it cannot repeat `func`
        return result

    def add(self, x: Tensor, again: Callable[[], Tensor]) -> None:
        """Makes x known to the recorder, because launches can use the address of x.

        When the call is repeated, the tensor that again() returns takes the place of x.
        """
        self.tensors.append(x)
        self.allocations.append(again)

    def note(
        self, kernel: Any, grid: tuple[int, ...], compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Adds a launch to the recording.

        Call `note` while the arguments are alive, because their addresses may belong to other tensors later.
        """
        if not launches_plainly(kernel):
            self.clear = False
            return
        encodings = iter(encodings_of(compiled))
        values = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
        try:
            places = [place for x in values for place in self._places(x, encodings)]
        except _Unclear:
            self.clear = False
            return
        self.launches.append((compiled, (*grid, 1, 1)[:3], places))

    def recording(self, outputs: tuple[Tensor, ...], stream: int) -> _Recording | _Known:
        """Returns the recording of the call that returned `outputs`, or `UNCLEAR` if the call cannot be repeated."""
        made = [x for x in self.tensors[self.n_inputs :] if x is not None]  # x is never None: only inputs can be None
        # Tensors are compared by address, not by identity, because an output may be a view of an allocated tensor.
        # Under a dispatch mode, even torch.empty returns a view.
        chosen = [i for output in outputs for i, x in enumerate(made) if _holds(x, output)]
        if not self.clear or len(chosen) != len(outputs):
            return _Known.UNCLEAR
        allocations = [*self.allocations]
        for i, output in zip(chosen, outputs, strict=True):
            allocations[i] = _allocation(output)
        shared = [i for i in self.temporary if i not in chosen and made[i].nbytes <= SHARED_BYTES]
        alone = [i for i in range(len(made)) if i not in shared]
        allocations = [allocations[i] for i in alone]
        starts, end = _in_a_row([made[i].nbytes for i in shared])
        if shared:
            allocations.append(_allocation(torch.empty(end, dtype=torch.uint8, device=made[shared[0]].device)))
        read = sorted(i for i in self._used() if i < self.n_inputs)
        # `places` maps an index in self.tensors to an index in the list of addresses (see `_Recording`).
        first_slice = len(read) + len(allocations)
        places = {i: n for n, i in enumerate([*read, *(self.n_inputs + i for i in alone)])}
        places |= {self.n_inputs + i: first_slice + n for n, i in enumerate(shared)}
        launches = self._launches(places, first_slice + len(shared), stream)
        descriptors = [replace(x, place=places[x.place]) for x in self.descriptors]
        same = sorted((places[one], places[other]) for one, other in self.same)
        slices = [(first_slice - 1, start) for start in starts]
        returned = _getter([alone.index(i) for i in chosen])
        return _Recording(_getter(read), allocations, self.constants, descriptors, launches, returned, same, slices)

    def _used(self) -> set[int]:
        """Returns the indices of all tensors whose addresses occur in self.launches, self.descriptors or self.same."""
        in_launches = {i for _, _, places in self.launches for tag, i in places if tag == "address"}
        return in_launches | {x.place for x in self.descriptors} | {i for pair in self.same for i in pair}

    def _launches(self, places: dict[int, int], n_addresses: int, stream: int) -> list[_Launch]:
        """Returns the launches.

        Each launch picks its arguments from a list of the constants, then the addresses, then the TMA descriptors.
        """
        n_constants = len(self.constants)

        def index_of(tag: str, i: int) -> int:
            if tag == "constant":
                return i
            return n_constants + (places[i] if tag == "address" else n_addresses + i)

        return [
            _Launch(prepared(compiled, grid, stream), _getter([index_of(tag, i) for tag, i in values]))
            for compiled, grid, values in self.launches
        ]

    def _places(self, x: Any, encodings: Any) -> list[tuple[str, int]]:
        """Returns where a repeated call finds the values for the kernel argument x, as a list of (tag, index).

        A tag is "constant", "address" or "descriptor". If x is a TMA descriptor, the list has one "descriptor" element,
        and one "constant" element for each size and stride. If x is not a TMA descriptor, the list has one element.
        """
        if isinstance(x, Tensor):
            place, offset = self._place(x.data_ptr())
            if offset:
                raise _Unclear
            return [("address", place)]
        if isinstance(x, TensorDescriptor):
            encoding = next(encodings, None)
            if encoding is None:
                raise _Unclear  # the compiled kernel has no encoding metadata for the TMA descriptor x
            self.descriptors.append(_Descriptor(*self._place(x.base.data_ptr()), x, encoding))
            sizes = [self._constant(size) for size in (*x.shape, *x.strides)]
            return [("descriptor", len(self.descriptors) - 1), *sizes]
        if any(hasattr(y, "data_ptr") for y in (x if isinstance(x, (list, tuple)) else [x])):
            raise _Unclear  # x contains a tensor, but a repeated call could not replace its address
        return [self._constant(x)]

    def _constant(self, x: Any) -> tuple[str, int]:
        self.constants.append(x)
        return "constant", len(self.constants) - 1

    def _place(self, address: int) -> tuple[int, int]:
        """Returns the index of the tensor whose first row contains `address`, and the offset in the row in bytes.

        The function looks for `address` only in the first row of each tensor, because the address ranges of whole
        tensors can overlap. For example, q, k and v can be views of one tensor. If several tensors start at the same
        address, `same` records that their addresses must also be equal in repeated calls.
        Raises: _Unclear if no tensor's first row contains `address`, or if several first rows do at different offsets.
        """
        found = []
        for i, x in enumerate(self.tensors):
            if x is not None and x.numel() and 0 <= address - x.data_ptr() < x.shape[-1] * x.element_size():
                found.append((i, address - x.data_ptr()))
        if len({offset for _, offset in found}) != 1:
            raise _Unclear
        (first, offset), *others = found
        self.same.update((first, i) for i, _ in others)
        return first, offset


def _allocation(x: Tensor) -> Callable[[], Tensor]:
    """Returns a function that allocates a tensor like x."""
    if x.device.type == "cuda" and x.device.index == torch.cuda.current_device():
        return partial(torch_private.empty_strided_cuda, tuple(x.shape), x.stride(), x.dtype)
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _in_a_row(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of slices that share one allocation, and the size of the allocation, all in bytes."""
    *starts, end = accumulate((-(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT for size in sizes), initial=0)
    return starts, end


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that takes a sequence and returns a tuple of its elements at the indices `places`.

    For a single index, operator.itemgetter would return the value itself, not a tuple.
    """
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


def _holds(x: Tensor, y: Tensor) -> bool:
    """Returns whether x and y are contiguous tensors over the same memory, possibly with different shapes."""
    if x.numel() == 0 or x.data_ptr() != y.data_ptr() or x.dtype != y.dtype:
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()
