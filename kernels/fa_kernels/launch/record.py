"""Records the launches of a call once, and repeats them for other tensors of the same shapes in little host time.

Most host time of a call goes into work whose result depends only on shapes, strides, dtypes and options: choosing
kernels and tiles, and Triton's search for the compiled kernel by about 30 arguments. Only addresses change.

`recorded` decorates a function. Its second call with a key runs as usual, under a recorder that notes which tensors it
allocates and what it passes to `launch`. The recorder traces each address among the arguments to the tensor that begins
there. Later calls with this key allocate, insert the new addresses and call the compiled kernels' launchers directly.

A recording belongs to one key, one stream and one device. A call runs as usual if an address is not a multiple of 16
bytes, a CUDA graph is being captured (it needs its own counter), a tool listens to launches, this version of Triton was
not tested, or FA_TRAIN_REPLAY=0. A key is never recorded again if its call ran an operator of torch, used an address of
no known tensor or of two overlapping ones, or if the recorder raised an error; the caller then gets the result of a
plain call. Keys do not contain tile tables and other module globals. Call `forget()` after changing them.

triton_launcher.py holds what is used of Triton. Of torch, this uses TorchDispatchMode and `_empty_strided_cuda`.
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

VARIABLE = "FA_TRAIN_REPLAY"  # environment variable: 0 switches recording off; read at the first call
MAX_KEYS = 512  # then all are forgotten, so that lengths that never come again take no memory
MAX_MAPS = 8192  # encoded descriptors of about 500 bytes: a training step has up to 23 per layer
MAX_ARGUMENTS = 1024  # lists of arguments, of 1 to 7 KB: a training step has two per layer
ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are not a multiple of it
# Temporaries up to this size share one allocation, as each allocation takes the host 1.4 us or more. Larger ones do
# not: the host time is hidden behind the GPU's work, and the allocator keeps blocks of their sizes.
SHARED_BYTES = 2**24
SLICE_ALIGNMENT = 512  # bytes, as in torch's allocator

_Function = TypeVar("_Function", bound=Callable[..., tuple[Tensor, ...]])


class _Known(Enum):
    """What is known about a key that has no recording."""

    SEEN_ONCE = "the key may never come again, so nothing is recorded yet"
    UNCLEAR = "its launches cannot be repeated"


class _Watched(threading.local):
    """The recording in progress in this thread; autograd runs a thread for each device."""

    recorder: "_Recorder | None" = None


_WATCHED = _Watched()
_KEYS: dict[Hashable, "_Recording | _Known"] = {}
_SAID = False  # whether a failure has been logged


def recorded(
    describe: Callable[..., tuple[tuple[Hashable, ...], Sequence[Tensor | None]]],
) -> Callable[[_Function], _Function]:
    """Decorates a function whose launches are repeated in later calls with the same key.

    The function's first argument is a tensor. It takes positional arguments, and returns new tensors only.

    Args:
        describe: takes the function's arguments and returns (key, inputs). The key holds all that the launches depend
            on, except the addresses of the inputs and the stream: shapes, strides, dtypes, devices and options. The
            inputs are all tensors that the function reads.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(*arguments: Any) -> tuple[Tensor, ...]:
            stream = _recordable_stream(arguments[0])
            if stream is None:
                return function(*arguments)
            key, inputs = describe(*arguments)
            return _repeat_or_run((key, stream), inputs, function, arguments)

        return cast(_Function, call)

    return decorate


def _recordable_stream(x: Tensor) -> int | None:
    """The current stream of x's GPU, or None if a call on x is not to be recorded or repeated."""
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
    """function(*arguments), by its recorded launches if the key has a recording."""
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
        failure = f"{type(error).__name__}: {error}"  # the error itself would keep the recorder's tensors alive
    if known is None:
        if len(_KEYS) >= MAX_KEYS:
            forget()
        _KEYS[key] = _Known.SEEN_ONCE
    outputs = function(*arguments)  # raises again if the function itself caused the error
    if failure is not None:
        _KEYS[key] = _Known.UNCLEAR
        _say_once(failure)
    return outputs


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs kernel[grid](*arguments, **constants), and notes it in the recording in progress."""
    compiled = kernel[grid](*arguments, **constants)
    if _WATCHED.recorder is not None:
        _WATCHED.recorder.note(kernel, grid, compiled, arguments, constants)


def lasting(x: Tensor) -> Tensor:
    """Returns x, a tensor that all calls with the same key and stream share, neither an input nor allocated by one."""
    recorder = _WATCHED.recorder
    if recorder is not None and all(x is not known for known in recorder.tensors):  # another launch may use it too
        recorder.add(x, lambda: x)
    return x


def forget() -> None:
    """Drops all recordings. Call it after changing what keys do not contain, such as tables of tiles."""
    _KEYS.clear()
    _arguments.cache_clear()


@cache
def _may_record() -> bool:
    """Whether this version of Triton was tested and FA_TRAIN_REPLAY is not 0.

    Raises: ValueError if FA_TRAIN_REPLAY is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1; got {wanted}")
    return wanted == "1" and torch.version.hip is None and is_known()


def _say_once(failure: str) -> None:
    """Logs once that a call could not be recorded. warnings.warn is not used: a user may have set it to raise."""
    global _SAID
    if not _SAID:
        _SAID = True
        logging.getLogger(__name__).warning(
            "attention could not record its launches, so calls take more host time. %s=0 switches recording off. %s",
            VARIABLE,
            failure,
        )


class _Launch(NamedTuple):
    """A function that launches a kernel with its arguments, and a function that picks them from all values."""

    run: Callable[..., None]
    arguments: Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)  # hashed by identity, as the key of a cache
class _Map:
    """A TMA descriptor of which all but the address is known."""

    place: int  # of its tensor among the addresses
    offset: int  # bytes from the start of the tensor; not 0 for the second column block of a head
    descriptor: TensorDescriptor
    encoding: Any  # Triton's, for this argument of the kernel


@lru_cache(maxsize=MAX_MAPS)
def _encoded(described: _Map, address: int) -> Any:
    """The encoded descriptor of the memory at `address`."""
    base = Address(address + described.offset, described.descriptor.base.dtype)
    return encoded(replace(described.descriptor, base=base), described.encoding)


@dataclass(frozen=True, eq=False)
class _Recording:
    """What a call allocates and launches. It holds no tensor except `lasting` ones.

    Addresses are, in order: of the inputs that launches read, of the allocations, of the slices of the last allocation.
    """

    read: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]  # picks the inputs that launches read
    allocations: list[Callable[[], Tensor]]  # if there are slices, they lie in the last one
    constants: list[Any]
    maps: list[_Map]
    launches: list[_Launch]
    outputs: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # picks them from the allocations
    same: list[tuple[int, int]]  # pairs of places whose addresses were equal, so that either may have been meant
    slices: list[tuple[int, int]]  # place among the addresses, and bytes from there

    def play(self, addresses: list[int]) -> tuple[Tensor, ...] | None:
        """Launches with these addresses of inputs. Returns None, without a launch, if Triton would launch others."""
        made = [allocate() for allocate in self.allocations]
        addresses += [x.data_ptr() for x in made]
        launches = _arguments(self, tuple(addresses))
        if launches is None:
            return None
        for run, arguments in launches:
            run(*arguments)
        return self.outputs(made)


@lru_cache(maxsize=MAX_ARGUMENTS)  # the same addresses come again in each step of a training run
def _arguments(
    recording: _Recording, addresses: tuple[int, ...]
) -> list[tuple[Callable[..., None], tuple[Any, ...]]] | None:
    """The function that launches each kernel, and its arguments.

    None if Triton would launch others: an address is not aligned, or two that were equal at the recording differ now.
    """
    if any(address % ALIGNMENT for address in addresses):
        return None
    if any(addresses[one] != addresses[other] for one, other in recording.same):
        return None
    addresses += tuple([addresses[place] + offset for place, offset in recording.slices])
    maps = [_encoded(x, addresses[x.place]) for x in recording.maps]
    values = [*recording.constants, *addresses, *maps]
    return [(run, arguments(values)) for run, arguments in recording.launches]


class _Unclear(Exception):
    """The call cannot be repeated for other addresses."""


class _Recorder(torch_private.TorchDispatchMode):
    """Watches one call. Holds every tensor that it knows, so that no address becomes another tensor's meanwhile."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors = [*inputs]
        self.n_inputs = len(inputs)
        self.clear = True
        self.allocations: list[Callable[[], Tensor]] = []
        self.temporary: list[int] = []  # indices of allocations that the call may drop at its end
        self.constants: list[Any] = []
        self.maps: list[_Map] = []
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
            self.clear = False  # GPU work that is no launch of ours
        return result

    def add(self, x: Tensor, again: Callable[[], Tensor]) -> None:
        """Adds a tensor that launches may use; again() returns the one of another call."""
        self.tensors.append(x)
        self.allocations.append(again)

    def note(
        self, kernel: Any, grid: tuple[int, ...], compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Notes a launch while its arguments are alive: later, an address may be another tensor's."""
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
        """The recording of the call that returned `outputs`, or UNCLEAR if it cannot be repeated."""
        made = [x for x in self.tensors[self.n_inputs :] if x is not None]  # all of them
        # not by identity: an output may be a view, as is what torch.empty returns under a mode
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
        # from a place among all tensors to one among the addresses of a _Recording
        first_slice = len(read) + len(allocations)
        places = {i: n for n, i in enumerate([*read, *(self.n_inputs + i for i in alone)])}
        places |= {self.n_inputs + i: first_slice + n for n, i in enumerate(shared)}
        launches = self._launches(places, first_slice + len(shared), stream)
        maps = [replace(x, place=places[x.place]) for x in self.maps]
        same = sorted((places[one], places[other]) for one, other in self.same)
        slices = [(first_slice - 1, start) for start in starts]
        returned = _getter([alone.index(i) for i in chosen])
        return _Recording(_getter(read), allocations, self.constants, maps, launches, returned, same, slices)

    def _used(self) -> set[int]:
        """Indices of the tensors whose addresses matter."""
        in_launches = {i for _, _, places in self.launches for tag, i in places if tag == "address"}
        return in_launches | {x.place for x in self.maps} | {i for pair in self.same for i in pair}

    def _launches(self, places: dict[int, int], n_addresses: int, stream: int) -> list[_Launch]:
        """The launches, whose values are constants, then addresses, then maps."""
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
        """Where to find what a launcher takes for the argument x: a tag (constant, address or map) and an index."""
        if isinstance(x, Tensor):
            place, offset = self._place(x.data_ptr())
            if offset:
                raise _Unclear
            return [("address", place)]
        if isinstance(x, TensorDescriptor):
            encoding = next(encodings, None)
            if encoding is None:
                raise _Unclear  # not for TMA
            self.maps.append(_Map(*self._place(x.base.data_ptr()), x, encoding))
            return [("map", len(self.maps) - 1), *(self._constant(size) for size in (*x.shape, *x.strides))]
        if any(hasattr(y, "data_ptr") for y in (x if isinstance(x, (list, tuple)) else [x])):
            raise _Unclear  # an address that nothing would replace
        return [self._constant(x)]

    def _constant(self, x: Any) -> tuple[str, int]:
        self.constants.append(x)
        return "constant", len(self.constants) - 1

    def _place(self, address: int) -> tuple[int, int]:
        """The index of the tensor with this address in its first row, and how many bytes after its start.

        Later rows do not count, because views of one tensor overlap, such as q, k and v of one projection. If several
        tensors begin at one address, they must do so again (`same`).
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
    """A function that allocates another tensor like x."""
    allocate = torch_private.empty_strided_cuda
    if allocate is not None and x.device.type == "cuda" and x.device.index == torch.cuda.current_device():
        return partial(allocate, tuple(x.shape), x.stride(), x.dtype)
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _in_a_row(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The starts of slices of these sizes in bytes, and the end of the last one."""
    *starts, end = accumulate((-(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT for size in sizes), initial=0)
    return starts, end


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the values in these places. itemgetter needs two places or more to return a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


def _holds(x: Tensor, y: Tensor) -> bool:
    """Whether y is x, in the same or another shape, and both are dense."""
    if x.numel() == 0 or x.data_ptr() != y.data_ptr() or x.dtype != y.dtype:
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()
