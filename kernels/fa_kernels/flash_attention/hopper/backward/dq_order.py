"""The dQ order: the parts of dQ are added in ascending order of tiles of keys, so that every run gives the same bits.

Each block of 64 queries of a head has a semaphore in global memory. A program computes the part of dQ that comes from
one tile of keys. The program adds the tile's part to dQ of a block, waits until the sum is in memory, and then writes
the number of the tile to the block's semaphore. Tile t adds to dQ of a block only when the block's semaphore is at
least t - 1. Each key is seen by one contiguous range of queries. The start and the end of a key's range of queries
never decrease from one key to the next. The tiles of keys that add to dQ of one block of queries therefore have
consecutive numbers. Tile t waits at a block only if tile t - 1 adds to dQ of that block.

The kernel cannot deadlock, because a tile waits only for the tile before it, and semaphores never decrease. Each
program has one tile, and programs start in ascending order. The unfinished tile with the lowest number never waits,
because the tile before it is finished.

A program visits blocks of queries from the last to the first. For each block, the program visits all query heads of the
KV head. Visiting the last block first lets the tiles of a document run shortly after one another, so that the data that
these tiles share stays in L2. If blocks were visited from the first to the last, the first block of tile t could be the
last block of tile t - 1. Tile t would then wait until tile t - 1 is almost finished, and the tiles of short documents
would run almost one by one.

Two extra warps handle the semaphores. `wait_for_order` waits for semaphores, and `raise_semaphores` sets semaphores.
If the dQ warpgroup handled the semaphores, it would wait for global memory and for a fence in each step. A step has 64
queries of one head, so each step needs only one semaphore.

Source: the deterministic backward passes of FlashAttention-2, -3 and -4.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.backward.items import first_step, locate_item, next_step
from fa_kernels.flash_attention.hopper.primitives.ring import new_barriers, place_of, wait_full
from fa_kernels.flash_attention.structure import structure

NO_TILE = gl.constexpr(-1)  # the value of a semaphore when a launch starts
_PLACES = gl.constexpr(2)  # the maximum number of `added` signals that `raise_semaphores` has not yet seen


@structure
class OrderBarriers:
    """The mbarriers with which the warps of one program keep the dQ order.

    due: one mbarrier for each place in the ring of dS. `due` signals that a step is allowed to add its part to dQ.
    added: `_PLACES` mbarriers. `added` signals that TMA has added a step's dQ to the sum in global memory.
    noted: `_PLACES` mbarriers. With `noted`, the warp that runs `raise_semaphores` confirms that it has received the
        signal `added` of a step. An mbarrier of `added` is used again only after `noted` has confirmed its previous
        signal.
    """

    due: gl.shared_memory_descriptor  # [DS_STAGES]
    added: gl.shared_memory_descriptor  # [_PLACES]; step i uses mbarrier i % _PLACES
    noted: gl.shared_memory_descriptor  # [_PLACES]; step i uses mbarrier i % _PLACES


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
    dq_order, ds_empty, semaphore_ptr, tile_order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Runs the warp that signals `due` for each step. `due` allows the program to add the step's part to dQ.

    Before each signal, the warp waits until the step's place in the ring of dS is empty. If the previous tile of keys
    also adds to dQ of the step's queries, the warp also waits until the previous tile's part is in memory.

    Example: a causal document has 256 queries (blocks 0 to 3 of 64 queries) and 256 keys (tiles 0 and 1 of 128 keys).
    The program of tile 0 visits blocks 3, 2, 1 and 0, and never waits. The program of tile 1 visits blocks 3 and 2, and
    waits at each block until the block's semaphore is 0.

    The dQ warpgroup empties a place in the ring only after it has received the place's signal `due`. The dQ warpgroup
    therefore receives each signal before this warp signals the same mbarrier again.
    """
    DS_STAGES: gl.constexpr = ds_empty.shape[0]
    gl.static_assert(BLOCK_M == ALIGNMENT)
    n_heads = tile_order.n_heads * GROUP
    item = locate_item(gl.program_id(0), tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    m, head = first_step(item, GROUP, BLOCK_M, DESCENDING=True)
    exists = item.first > 0  # whether there is a tile of keys before the item's tile
    start_before = gl.load(ranges.start + item.first - BLOCK_N, mask=exists, other=0) // ALIGNMENT * ALIGNMENT
    end_before = gl.load(ranges.end + item.first - 1, mask=exists, other=0)
    for step in range(item.n_steps):
        stage, phase = place_of(step, DS_STAGES)
        mbarrier.wait(ds_empty.index(stage), phase ^ 1)
        if (m >= start_before) & (m < end_before):
            _wait_for(semaphore_ptr + m // BLOCK_M * n_heads + head, item.first // BLOCK_N - 1)
        mbarrier.arrive(dq_order.due.index(stage), count=1)
        m, head = next_step(m, head, item, GROUP, BLOCK_M, DESCENDING=True)


@gluon.jit
def note_added(dq_order, step, PENDING: gl.constexpr):
    """Signals that dQ of `step` is in memory. The dQ warpgroup calls this function.

    Before the signal, the function waits until TMA has added dQ of `step` to memory. The last `PENDING` TMA operations
    belong to later steps, and may still be running when the function returns. If `step` is -1, the function gives no
    signal.
    """
    asm: gl.constexpr = f"cp.async.bulk.wait_group {PENDING}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], gl.int32, False, 1)
    place, phase = place_of(step + _PLACES, _PLACES)  # adding _PLACES avoids a negative index for step -1
    # `added` is a ring of mbarriers, and each step uses the next mbarrier of the ring. A step first waits until
    # `raise_semaphores` has received the previous signal of the step's mbarrier.
    mbarrier.wait(dq_order.noted.index(place), phase, pred=step >= 0)
    mbarrier.arrive(dq_order.added.index(place), count=1, pred=step >= 0)


@gluon.jit
def raise_semaphores(
    dq_order, semaphore_ptr, tile_order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """Runs the warp that sets semaphores.

    When dQ of a step is in memory, the warp raises the semaphore of the step's queries to the tile's number.
    """
    n_heads = tile_order.n_heads * GROUP
    item = locate_item(gl.program_id(0), tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    m, head = first_step(item, GROUP, BLOCK_M, DESCENDING=True)
    for step in range(item.n_steps):
        wait_full(dq_order.added, step)
        mbarrier.arrive(dq_order.noted.index(step % _PLACES), count=1)
        _raise(semaphore_ptr + m // BLOCK_M * n_heads + head, item.first // BLOCK_N)
        m, head = next_step(m, head, item, GROUP, BLOCK_M, DESCENDING=True)


@gluon.jit
def _wait_for(semaphore, number):
    """Waits until a semaphore is at least `number`.

    When the function returns, dQ of the semaphore's block includes the parts of all tiles up to `number`.

    One warp calls this function.
    """
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; WAIT: ld.acquire.gpu.global.b32 x, [$1]; setp.lt.s32 p, x, $2; @p bra WAIT; "
        "fence.proxy.async.global; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)


@gluon.jit
def _raise(semaphore, number):
    """Raises a semaphore to `number`. One warp calls this function.

    When another program returns from `_wait_for(semaphore, number)`, the other program sees all writes that this warp
    saw before `_raise`.
    """
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; elect.sync x|p, -1; @p red.release.gpu.global.max.s32 [$1], $2; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)
