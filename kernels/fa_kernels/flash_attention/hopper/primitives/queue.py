"""A queue of work items: persistent programs take the next one from a counter, and hand it to their warpgroups.

A static split of the items over the programs ends when the unluckiest program does; a counter lets whoever is done
take the next. One warp of a program takes items and posts what it found of each (up to 32 numbers) in one of two slots
of shared memory, which its warpgroups read, so that one warp waits for global memory where many would.

Program i works item i first and then item (number of programs) + ticket, so that a launch hands out exactly as many
tickets as it has items, and whoever draws the last one sets the counter back to 0 for the next launch.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.device import multiprocessors
from fa_kernels.launch.record import lasting

_FIELDS = gl.constexpr(32)
# the backward kernels draw the next item when so many steps of this one are left to load: early enough to have the
# answer in time, and late enough not to hold, with much left to do, an item that an idle program could take
DRAWN_BEFORE = gl.constexpr(4)
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """(1,) int32 on `device`, 0 when the next launch on the current stream begins, which leaves it 0.

    One counter for each stream: launches on one stream follow one another, but two on different streams may run at the
    same time and would take each other's tickets. A CUDA graph may be replayed on any stream, so while one is captured
    every launch gets a counter of its own, zeroed within the graph. Never waits for the GPU.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)
    key = device, stream.cuda_stream
    if key not in _COUNTERS:
        # by another thread: torch.compile(mode="reduce-overhead") lends this one a memory pool that it empties later
        with ThreadPoolExecutor(1) as thread:
            _COUNTERS[key] = thread.submit(_zero, stream).result()
    return _COUNTERS[key]


def programs_of(n_items: int, device: torch.device, dynamic: bool) -> tuple[int, Tensor | None]:
    """How many programs a launch has, and the counter that its kernel takes; without one, a program works one item."""
    if not dynamic:
        return n_items, None
    return min(n_items, multiprocessors(device)), lasting(counter(device))


def _zero(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(1, dtype=torch.int32, device=stream.device)


@gluon.jit
def new_queue(READERS: gl.constexpr):
    """Two slots for items and their barriers; READERS warpgroups read each item."""
    slots = gl.allocate_shared_memory(gl.int32, [2, _FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return slots, full, empty


@gluon.jit
def take(counter_ptr):
    """For a single warp: draws a ticket. In lane 0 alone, and in flight until `item_of` asks for it."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 $0, 0; "
        "@p atom.global.add.u32 $0, [$1], 1; }"
    )
    return gl.inline_asm_elementwise(asm, "=&r,l,~{memory}", [counter_ptr.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def item_of(ticket, counter_ptr, n_items):
    """The item that a ticket stands for, in every lane; n_items or more: there is none left."""
    ticket = gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [ticket], gl.int32, False, 1)
    if ticket == n_items - 1:  # nobody draws after this one
        gl.store(counter_ptr, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def post(queue, turn, fields):
    """For a single warp: hands the tuple of int32 scalars to the readers as the program's item number `turn`."""
    slots, full, empty = queue
    index = gl.arange(0, _FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    values = gl.where(index == 0, fields[0], 0)
    for i in gl.static_range(1, len(fields)):
        values = gl.where(index == i, fields[i], values)
    slot = turn % 2
    mbarrier.wait(empty.index(slot), (turn // 2) & 1 ^ 1)
    slots.index(slot).store(values)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def read(queue, turn):
    """For a warpgroup: the program's item number `turn`, as `field` takes it; waits until it is posted."""
    slots, full, empty = queue
    slot = turn % 2
    mbarrier.wait(full.index(slot), (turn // 2) & 1)
    values = slots.index(slot).load(gl.BlockedLayout([32], [32], [4], [0]))  # all of them in every thread
    mbarrier.arrive(empty.index(slot), count=1)
    return values


@gluon.jit
def field(values, INDEX: gl.constexpr):
    """Number INDEX of what was posted; all in one thread's registers, the sum folds into picking one of them."""
    index = gl.arange(0, _FIELDS, layout=gl.BlockedLayout([32], [32], [4], [0]))
    return gl.sum(gl.where(index == INDEX, values, 0), 0)


@gluon.jit
def five_fields(values):
    """The first five numbers of what was posted."""
    return field(values, 0), field(values, 1), field(values, 2), field(values, 3), field(values, 4)
