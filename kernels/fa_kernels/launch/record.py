"""The launches of a call, recorded once and made again for other tensors of the same shapes, in little host time.

Why: most of what a call takes the host is the same in every layer and step: which kernel, which tiles, which strides,
and Triton's search for the compiled kernel by some 30 arguments. All of it follows from shapes, strides, dtypes and
options; only addresses differ. On an H200 that is most of the 141 us of a short forward pass.

How: the second call of a kind (`replayed`) runs as ever, and is watched: which tensors it allocates, and what it hands
to `launch`. Each address among the arguments is traced back to the tensor that begins there. Later calls of the kind
allocate, put the new addresses into their places, and hand the arguments to the compiled kernels' launchers. What the
call drops at its end has one allocation then, unless it is large.

A recording holds for one kind of call, one stream and one device. A call is launched anew, whether or not
its kind is recorded, in these cases: an address is not a multiple of 16 bytes; a CUDA graph is being captured, which
needs its own counter; a tool listens to launches; the version of Triton was not tested; or FA_TRAIN_REPLAY=0. A kind is
never recorded again if its call cannot be replayed: it ran an operator of torch, or used an address that belongs to no
known tensor or to one of two. The same holds after any error in the recorder; the caller then gets the result of a
plain call. Tile tables and other module globals are not part of a kind. Call `forget` after changing them.

triton_launcher.py holds what is used of Triton. What is used of torch: TorchDispatchMode, and `_empty_strided_cuda`,
which torch.compile's code calls too.
"""

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

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
    is_known,
    is_observed,
    launches_plainly,
    prepared,
)

VARIABLE = "FA_TRAIN_REPLAY"  # environment variable: 0 switches recording off; read at the first call
KEPT = 512  # kinds of calls; then all are forgotten, so that lengths that never come again take no memory
KEPT_MAPS = 8192  # encoded descriptors, of some 500 bytes: a training step has 23 or less for each layer
KEPT_ARGUMENTS = 1024  # lists of arguments, of 1 to 7 KB: a training step has two for each layer
ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are no multiple of it
# Bytes of a tensor up to which it shares an allocation with others that a call drops at its end, as each takes the host
# 1.4 us or more. Nobody waits for that where tensors are larger: those keep the sizes that the first calls had.
SHARED_BYTES = 2**24
PART_ALIGNMENT = 512  # bytes, as torch's allocator has it


class _Known(Enum):
    """What is known of a kind of call without a recording."""

    SEEN = "once: nothing is recorded of what may never come again"
    UNCLEAR = "that its launches cannot be made again"


class _Watched(threading.local):
    """The recording under way: of this thread alone, as autograd calls from a thread of each device."""

    recorder: "_Recorder | None" = None


_WATCHED = _Watched()
_KINDS: dict[Hashable, "_Recording | _Known"] = {}
_SAID = False  # whether a failure has been logged


def replayed(
    kind: tuple[Hashable, ...], inputs: Sequence[Tensor | None], call: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """call(), or its launches again with the addresses of these inputs.

    kind: all that call()'s launches depend on but the inputs' addresses and the stream: shapes, strides, dtypes,
    devices and options. The inputs, the first of which is a tensor, are all that it reads; all that it returns is new.
    """
    first = inputs[0]
    assert first is not None
    if not first.is_cuda or not _may_record():
        return call()
    device = current_device()
    if device != first.get_device() or torch.cuda.is_current_stream_capturing() or is_observed():
        return call()
    stream = current_stream(device)
    key = kind, stream
    known = _KINDS.get(key)
    failure = None
    try:
        if isinstance(known, _Recording):
            played = known.play([x.data_ptr() for x in known.read(inputs)])
            if played is not None:
                return played
        elif known is _Known.SEEN and not any(x is not None and x.data_ptr() % ALIGNMENT for x in inputs):
            recorder = _Recorder(inputs)
            outputs = recorder.watch(call)
            _KINDS[key] = recorder.recording(outputs, stream)
            return outputs
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"  # the error itself would keep the recorder's tensors alive
    if known is None:
        if len(_KINDS) >= KEPT:
            forget()
        _KINDS[key] = _Known.SEEN
    outputs = call()  # raises again if the call itself caused the error
    if failure is not None:
        _KINDS[key] = _Known.UNCLEAR
        _say_once(failure)
    return outputs


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), and noted where it is recorded."""
    compiled = kernel[grid](*arguments, **constants)
    if _WATCHED.recorder is not None:
        _WATCHED.recorder.note(kernel, grid, compiled, arguments, constants)


def lasting(x: Tensor) -> Tensor:
    """x, for what a call neither is handed nor allocates: all calls of its kind and stream share it."""
    recorder = _WATCHED.recorder
    if recorder is not None and all(x is not known for known in recorder.tensors):  # another launch may have it too
        recorder.add(x, lambda: x)
    return x


def forget() -> None:
    """Drops all recordings: for who changes what kinds do not name, as tests and tuning do with tables of tiles."""
    _KINDS.clear()
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
    """What launches a kernel with its arguments, and which of all values those are."""

    run: Callable[..., None]
    arguments: Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)  # so that it is its own key of a cache
class _Map:
    """A descriptor of whatever tensor stands in a place: all but its address is known."""

    place: int  # among the addresses
    offset: int  # bytes from there: a part of a tensor's columns is described by itself
    descriptor: TensorDescriptor
    encoding: Any  # Triton's, for this argument of the kernel


@lru_cache(maxsize=KEPT_MAPS)
def _encoded(described: _Map, address: int) -> Any:
    """What TMA takes for a descriptor of the memory at `address`: a function of these two alone."""
    base = Address(address + described.offset, described.descriptor.base.dtype)
    return encoded(replace(described.descriptor, base=base), described.encoding)


@dataclass(frozen=True, eq=False)
class _Recording:
    """What a call allocates and launches. Addresses are of the inputs that it reads, then of what it allocates.

    Behind them come those of parts of the last allocation. It holds no tensor but those that are `lasting`.
    """

    read: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]  # which of the inputs
    allocations: list[Callable[[], Tensor]]  # the last one, if there are parts, is of those
    constants: list[Any]
    maps: list[_Map]
    launches: list[_Launch]
    outputs: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # of what is allocated
    same: list[tuple[int, int]]  # addresses of inputs that were one, so that either may have been meant
    parts: list[tuple[int, int]]  # places among the addresses, and bytes from there

    def play(self, addresses: list[int]) -> tuple[Tensor, ...] | None:
        """Launches with these addresses of inputs; None, and no launch, where Triton would make others."""
        made = [allocate() for allocate in self.allocations]
        addresses += [x.data_ptr() for x in made]
        launches = _arguments(self, tuple(addresses))
        if launches is None:
            return None
        for run, arguments in launches:
            run(*arguments)
        return self.outputs(made)


@lru_cache(maxsize=KEPT_ARGUMENTS)
def _arguments(
    recording: _Recording, addresses: tuple[int, ...]
) -> list[tuple[Callable[..., None], tuple[Any, ...]]] | None:
    """What launches each kernel, and its arguments, from constants, addresses and encoded descriptors.

    None where the launches would be none of these: an address is not aligned, or two were one when they were recorded.
    A function of the addresses alone, which come again in each step of a training run: so they are kept.
    """
    if any(address % ALIGNMENT for address in addresses):
        return None
    if any(addresses[one] != addresses[other] for one, other in recording.same):
        return None
    addresses += tuple([addresses[place] + offset for place, offset in recording.parts])
    maps = [_encoded(x, addresses[x.place]) for x in recording.maps]
    values = [*recording.constants, *addresses, *maps]
    return [(run, arguments(values)) for run, arguments in recording.launches]


class _Unclear(Exception):
    """What a call does cannot be made again for other addresses."""


class _Recorder(torch_private.TorchDispatchMode):
    """Watches one call. Holds all tensors that it knows, so that no address is free to become another's."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors = [*inputs]
        self.n_inputs = len(inputs)
        self.clear = True
        self.allocations: list[Callable[[], Tensor]] = []
        self.dropped: list[int] = []  # of these, what the call makes for itself, unless it returns it
        self.constants: list[Any] = []
        self.maps: list[_Map] = []
        self.launches: list[tuple[Any, tuple[int, ...], list[tuple[str, int]]]] = []
        self.same: set[tuple[int, int]] = set()

    def watch(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        _WATCHED.recorder = self
        try:
            with self:
                return call()
        finally:
            _WATCHED.recorder = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.dropped.append(len(self.allocations))
            self.add(result, _allocation(result))
        elif not func.is_view:
            self.clear = False  # work of the GPU that is no launch
        return result

    def add(self, x: Tensor, again: Callable[[], Tensor]) -> None:
        """x may be an argument; again() makes the one of another call."""
        self.tensors.append(x)
        self.allocations.append(again)

    def note(
        self, kernel: Any, grid: tuple[int, ...], compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """At the launch, when all that it was handed is alive: later, an address may be another tensor's."""
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
        """UNCLEAR where something was done that cannot be made again."""
        made = [x for x in self.tensors[self.n_inputs :] if x is not None]  # all of them
        # not by identity: an output may be a view, as is what torch.empty returns under a mode
        chosen = [i for output in outputs for i, x in enumerate(made) if _holds(x, output)]
        if not self.clear or len(chosen) != len(outputs):
            return _Known.UNCLEAR
        allocations = [*self.allocations]
        for i, output in zip(chosen, outputs, strict=True):
            allocations[i] = _allocation(output)
        shared = [i for i in self.dropped if i not in chosen and made[i].nbytes <= SHARED_BYTES]
        alone = [i for i in range(len(made)) if i not in shared]
        allocations = [allocations[i] for i in alone]
        starts, end = _in_a_row([made[i].nbytes for i in shared])
        if shared:
            allocations.append(_allocation(torch.empty(end, dtype=torch.uint8, device=made[shared[0]].device)))
        in_launches = {i for _, _, places in self.launches for sort, i in places if sort == "address"}
        used = in_launches | {x.place for x in self.maps} | {i for pair in self.same for i in pair}
        read = sorted(i for i in used if i < self.n_inputs)
        # from a place among all tensors to one among addresses: of inputs, of allocations, of parts of the last one
        n_asked = len(read) + len(allocations)
        places_of = {i: n for n, i in enumerate([*read, *(self.n_inputs + i for i in alone)])}
        places_of |= {self.n_inputs + i: n_asked + n for n, i in enumerate(shared)}
        n_constants, n_addresses = len(self.constants), n_asked + len(shared)
        of_sort: dict[str, Callable[[int], int]] = {
            "constant": lambda i: i,
            "address": lambda i: n_constants + places_of[i],
            "map": lambda i: n_constants + n_addresses + i,
        }
        launches = [
            _Launch(prepared(compiled, grid, stream), _getter([of_sort[sort](i) for sort, i in places]))
            for compiled, grid, places in self.launches
        ]
        maps = [replace(x, place=places_of[x.place]) for x in self.maps]
        same = sorted((places_of[one], places_of[other]) for one, other in self.same)
        parts = [(n_asked - 1, start) for start in starts]
        returned = _getter([alone.index(i) for i in chosen])
        return _Recording(_getter(read), allocations, self.constants, maps, launches, returned, same, parts)

    def _places(self, x: Any, encodings: Any) -> list[tuple[str, int]]:
        """Where to find, for an argument, what a launcher takes: constants, addresses or maps, and their indices."""
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
            raise _Unclear  # an address that nothing would put another in the place of
        return [self._constant(x)]

    def _constant(self, x: Any) -> tuple[str, int]:
        self.constants.append(x)
        return "constant", len(self.constants) - 1

    def _place(self, address: int) -> tuple[int, int]:
        """The tensor with this address in its first row, and how many bytes after its start.

        No further, as views of one tensor lie within each other: q, k and v of one projection do so. Where more than
        one begin at one address they must do so again (`same`).
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
    """What allocates another like x."""
    allocate = torch_private.empty_strided_cuda
    if allocate is not None and x.device.type == "cuda" and x.device.index == torch.cuda.current_device():
        return partial(allocate, tuple(x.shape), x.stride(), x.dtype)
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _in_a_row(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these bytes begin, and the last one ends."""
    *starts, end = accumulate((-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes), initial=0)
    return starts, end


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The values in these places; itemgetter makes no tuple of one, and none of no places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


def _holds(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, in y's shape or another; both are dense if so."""
    if x.numel() == 0 or x.data_ptr() != y.data_ptr() or x.dtype != y.dtype:
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()
