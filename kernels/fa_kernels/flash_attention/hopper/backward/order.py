"""The dQ order: tiles of keys add to dQ in the order of the stream, so that every run gives the same bits.

Each block of 64 queries of a head has a semaphore in global memory. After a tile of keys has added to the block, and
the sum is in memory, the tile writes its own number to the semaphore. The next tile waits until the semaphore holds the
number of the tile before it, or a higher one. Ranges never move backwards, so the tiles that add to a block are
consecutive. A tile therefore waits only if the tile before it adds to the same block.

There is no deadlock. A tile waits only for an earlier tile that will add to the same block, and semaphores never fall.
Programs have one tile each and start in the order of the stream, so the first unfinished tile waits for nothing.

A tile processes its queries from the last block to the first, and all heads of a group for each block. The tiles of a
document then follow one another closely, and the data that they share stays in L2.

Two extra warps handle the semaphores: `wait_for_order` waits for them, and `raise_semaphores` sets them. The dQ
warpgroup would otherwise wait for global memory and for a fence in each step. Steps have 64 queries. With 128, the
tiles of short documents would wait for one another in a chain through the whole stream.

Source: the deterministic backward passes of FlashAttention-2, -3 and -4.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.backward.items import first_step, locate_item, next_step
from fa_kernels.flash_attention.hopper.primitives.ring import new_barriers, place_of, wait_full
from fa_kernels.flash_attention.hopper.primitives.structure import structure

NO_TILE = gl.constexpr(-1)  # the value of a semaphore when a launch starts
_PLACES = gl.constexpr(2)  # the maximum number of steps that are in memory and whose semaphores are not yet set


@structure
class OrderBarriers:
    """The mbarriers of the dQ order."""

    due: gl.shared_memory_descriptor  # [DS_STAGES]: the step in this stage of dS may be added to dQ
    added: gl.shared_memory_descriptor  # [_PLACES]: the sum of a step is in memory
    noted: gl.shared_memory_descriptor  # [_PLACES]: `raise_semaphores` has seen `added`


@gluon.jit
def new_order_barriers(DS_STAGES: gl.constexpr):
    """Returns initialised barriers."""
    due = new_barriers(DS_STAGES)
    added = new_barriers(_PLACES)
    noted = new_barriers(_PLACES)
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(due.index(stage), count=1)
    for place in gl.static_range(_PLACES):
        mbarrier.init(added.index(place), count=1)
        mbarrier.init(noted.index(place), count=1)
    return OrderBarriers(due, added, noted)


@gluon.jit
def wait_for_order(
    dq_order, ds_empty, semaphore_ptr, order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Runs one warp: it signals `due` for each step, after the tile before has added to the step's queries.

    It first waits until the step's stage of dS is empty, which happens only after the signal for the previous step in
    that stage. Neither barrier can therefore get two phases ahead.
    """
    DS_STAGES: gl.constexpr = ds_empty.shape[0]
    gl.static_assert(BLOCK_M == ALIGNMENT)
    n_heads = order.n_heads * GROUP
    item = locate_item(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    m, head = first_step(item, GROUP, BLOCK_M, True)
    exists = item.first > 0  # whether there is a tile before this one
    start_before = gl.load(ranges.start + item.first - BLOCK_N, mask=exists, other=0) // ALIGNMENT * ALIGNMENT
    end_before = gl.load(ranges.end + item.first - 1, mask=exists, other=0)
    for step in range(item.n_steps):
        stage, phase = place_of(step, DS_STAGES)
        mbarrier.wait(ds_empty.index(stage), phase ^ 1)
        if (m >= start_before) & (m < end_before):
            _wait_for(semaphore_ptr + m // BLOCK_M * n_heads + head, item.first // BLOCK_N - 1)
        mbarrier.arrive(dq_order.due.index(stage), count=1)
        m, head = next_step(m, head, item, GROUP, BLOCK_M, True)


@gluon.jit
def note_added(dq_order, step, PENDING: gl.constexpr):
    """Signals that the sum of `step` is in memory. Does nothing for step -1. The dQ warpgroup calls this.

    It first waits until at most PENDING TMA operations are incomplete; these belong to later steps.
    """
    asm: gl.constexpr = f"cp.async.bulk.wait_group {PENDING}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], gl.int32, False, 1)
    place, phase = place_of(step + _PLACES, _PLACES)  # adding _PLACES avoids a negative index for step -1
    mbarrier.wait(dq_order.noted.index(place), phase, pred=step >= 0)  # waits for the previous step in this place
    mbarrier.arrive(dq_order.added.index(place), count=1, pred=step >= 0)


@gluon.jit
def raise_semaphores(
    dq_order, semaphore_ptr, order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Runs one warp: it writes the tile's number to the semaphore of each step whose sum is in memory."""
    n_heads = order.n_heads * GROUP
    item = locate_item(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    m, head = first_step(item, GROUP, BLOCK_M, True)
    for step in range(item.n_steps):
        wait_full(dq_order.added, step)
        mbarrier.arrive(dq_order.noted.index(step % _PLACES), count=1)
        _raise(semaphore_ptr + m // BLOCK_M * n_heads + head, item.first // BLOCK_N)
        m, head = next_step(m, head, item, GROUP, BLOCK_M, True)


@gluon.jit
def _wait_for(semaphore, number):
    """Waits until a semaphore is `number` or more. Earlier sums are then in memory. One warp calls this."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; WAIT: ld.acquire.gpu.global.b32 x, [$1]; setp.lt.s32 p, x, $2; @p bra WAIT; "
        "fence.proxy.async.global; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)


@gluon.jit
def _raise(semaphore, number):
    """Raises a semaphore to `number` once every write that this warp knows of is visible. One warp calls this."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; elect.sync x|p, -1; @p red.release.gpu.global.max.s32 [$1], $2; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)
