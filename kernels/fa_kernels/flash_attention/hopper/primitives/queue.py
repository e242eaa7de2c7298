"""A queue of work items for persistent programs.

Program i processes item i first, and then draws tickets from a counter in global memory. With n programs, ticket t
belongs to item n + t. A program stops when its ticket belongs to no item. A program that processes k items draws k
tickets: one for each item after the first item, and a last ticket that belongs to no item. In a launch, the number of
tickets is therefore equal to the number of items. The warp that draws the last ticket resets the counter to 0 for the
next launch.

One warp of a program draws tickets, and posts each item in one of two slots in shared memory. A slot holds up to 32
integers. The warpgroups that read the slots wait only for an mbarrier, not for global memory.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.device import multiprocessors
from fa_kernels.flash_attention.hopper.primitives.ring import new_barriers
from fa_kernels.flash_attention.structure import structure
from fa_kernels.launch.record import lasting

_FIELDS = gl.constexpr(32)
# A program draws its next ticket before it loads the tiles of an item's last 4 steps. Drawing tickets earlier would
# balance the work less well. Drawing tickets later would delay the loads of the next item.
DRAWN_BEFORE = gl.constexpr(4)
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Returns the counter for the next launch on the current stream: (1,) int32, 0 before and after each launch.

    Each stream has its own counter, because launches on two streams may run at the same time. During the capture of a
    CUDA graph, each launch gets a new counter, because the graph may be replayed on any stream. Each replay of the CUDA
    graph sets this new counter to 0. A call of `counter` never waits for the GPU.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)
    key = device, stream.cuda_stream
    if key not in _COUNTERS:
        # A new thread allocates the counter, because torch.compile(mode="reduce-overhead") may free what the current
        # thread allocates.
        with ThreadPoolExecutor(1) as thread:
            _COUNTERS[key] = thread.submit(_zero, stream).result()
    return _COUNTERS[key]


def programs_of(n_items: int, device: torch.device, dynamic: bool) -> tuple[int, Tensor | None]:
    """Returns the number of programs of a launch, and the counter of their queue.

    If `dynamic` is false, each program processes one item, and the counter is None.
    """
    if not dynamic:
        return n_items, None
    return min(n_items, multiprocessors(device)), lasting(counter(device))


def _zero(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(1, dtype=torch.int32, device=stream.device)


@structure
class Queue:
    """Two slots for work items, each with two mbarriers."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # an item was posted in the slot
    empty: gl.shared_memory_descriptor  # all warpgroups have read the slot


@gluon.jit
def new_queue(READERS: gl.constexpr):
    """Returns a queue whose items are read by `READERS` warpgroups."""
    slots = gl.allocate_shared_memory(gl.int32, [2, _FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = new_barriers(2)
    empty = new_barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Queue(slots, full, empty)


@gluon.jit
def take(counter_ptr):
    """Draws a ticket for the calling warp, and does not wait for the ticket.

    Only lane 0 gets the ticket. Pass the result to `item_of`, which waits for the ticket.
    """
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 $0, 0; "
        "@p atom.global.add.u32 $0, [$1], 1; }"
    )
    return gl.inline_asm_elementwise(asm, "=&r,l,~{memory}", [counter_ptr.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def item_of(ticket, counter_ptr, n_items):
    """Returns the index of a ticket's item. Every lane of the warp gets the index.

    An index of n_items or more means that no item is left.
    """
    ticket = gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [ticket], gl.int32, False, 1)
    if ticket == n_items - 1:  # the last ticket of the launch
        gl.store(counter_ptr, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def post(queue, item_number, fields):
    """Posts the fields of an item, which are int32 scalars. After the last item, it posts one field, -1.

    One warp calls this function. item_number: the number of items that the program has already posted.
    """
    index = gl.arange(0, _FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    values = gl.where(index == 0, fields[0], 0)
    for i in gl.static_range(1, len(fields)):
        values = gl.where(index == i, fields[i], values)
    slot = item_number % 2
    mbarrier.wait(queue.empty.index(slot), (item_number // 2) & 1 ^ 1)
    queue.slots.index(slot).store(values)
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def read(queue, item_number):
    """Waits until an item is posted, and returns the item's fields. The function `field` reads one field of the item.

    A whole warpgroup calls this function.
    """
    slot = item_number % 2
    mbarrier.wait(queue.full.index(slot), (item_number // 2) & 1)
    values = queue.slots.index(slot).load(gl.BlockedLayout([32], [32], [4], [0]))  # every thread gets all fields
    mbarrier.arrive(queue.empty.index(slot), count=1)
    return values


@gluon.jit
def field(values, INDEX: gl.constexpr):
    """Returns field `INDEX` of a posted item. Each thread holds all fields, so `field` only copies a register."""
    index = gl.arange(0, _FIELDS, layout=gl.BlockedLayout([32], [32], [4], [0]))
    return gl.sum(gl.where(index == INDEX, values, 0), 0)
