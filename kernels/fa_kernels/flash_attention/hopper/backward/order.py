"""The order in which tiles of keys add to dQ, where it must be the same each time: that of the stream.

Each 64 queries of a head have a semaphore in global memory, where a tile leaves its number when what it added is there.
The tile after it waits until that number, or a higher one, stands there. Ranges only move forwards from key to key, so
the tiles that 64 queries see follow one another without a gap, and a tile need only know of the one before it whether
that adds to these queries too.

No tile waits for good, whatever the ranges: it waits for one that will come to the same queries, numbers in a semaphore
only rise, and programs, of one tile each, begin in order, with the first tile. So the first that is not done waits for
none.

A tile goes from its last queries to its first, with all heads of a group for each block of them: then the tiles of a
head, of which the first is the longest, follow one another closely from the document's end on, and what they read and
add to stays in L2. All heads are worked at once, or the tiles of one would all begin at a time. From the last tile to
the first, forwards, no tile would wait at its beginning, but programs would be spread over the document: at head_dim
128 with four heads a KV head 32k and 128k tokens then had 0.76 and 0.74 of the speed of any order, and have 1.00 and
1.02 so, but eight documents of 2k, which had 0.94, have 0.80 (bf16, run 37 of
scripts/results/hopper_kernels_h200_202611.md).

Two warps do nothing else: one asks for the semaphores, one sets them. Done by the warpgroup that adds to dQ, which then
waits for the answer and for the fence before a semaphore is set, 16k tokens had 0.70 of the speed of any order at
head_dim 64 and 0.82 at 128; so they had 0.83 to 0.92 and 0.90 to 0.95 (run 36, from the last tile to the first).

Steps are of 64 queries. Of 128, tiles of short documents waited for one another in a chain through the stream, each for
the next one's first step, half of which is its own: 25.5 ms for 1.8 (head_dim 64, fp16).

Source: the deterministic backward passes of FlashAttention-2 and -3, with a semaphore for each block of queries, and of
FlashAttention-4, which begins with the shortest tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.hopper.backward.items import decode, first_step, next_step

NOBODY = gl.constexpr(-1)  # in a semaphore when a launch begins
_PLACES = gl.constexpr(2)  # steps whose sums are in memory and whose semaphores are not set


@gluon.jit
def new_turns(DS_STAGES: gl.constexpr):
    """Barriers: of each stage of dS that its step may be added; of each place that a step is in memory, and noted."""
    due = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [_PLACES, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [_PLACES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(due.index(stage), count=1)
    for place in gl.static_range(_PLACES):
        mbarrier.init(added.index(place), count=1)
        mbarrier.init(noted.index(place), count=1)
    return due, added, noted


@gluon.jit
def await_turns(
    turns, ds_empty, semaphore_ptr, order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """One warp: says of each step of the program's item when the tile before has added to the same queries.

    No sooner than a stage of dS is free for it, which waits for the turn of the step before there: so neither barrier
    gets two phases ahead.
    """
    due, _, _ = turns
    DS_STAGES: gl.constexpr = ds_empty.shape[0]
    gl.static_assert(BLOCK_M == ALIGNMENT)
    query_start_ptr, query_end_ptr, _ = ranges
    n_heads = order[2] * GROUP
    found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    first, _, start, end, n_steps = found
    m, head = first_step(found, GROUP, BLOCK_M, True)
    there = first > 0  # a tile before this one
    start_before = gl.load(query_start_ptr + first - BLOCK_N, mask=there, other=0) // ALIGNMENT * ALIGNMENT
    end_before = gl.load(query_end_ptr + first - 1, mask=there, other=0)
    for step in range(n_steps):
        stage, phase = step % DS_STAGES, (step // DS_STAGES) & 1
        mbarrier.wait(ds_empty.index(stage), phase ^ 1)
        if (m >= start_before) & (m < end_before):
            _wait_for(semaphore_ptr + m // BLOCK_M * n_heads + head, first // BLOCK_N - 1)
        mbarrier.arrive(due.index(stage), count=1)
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M, True)


@gluon.jit
def note_added(turns, step, PENDING: gl.constexpr):
    """For the warpgroup that adds by TMA: step `step` is in memory, once all but the last PENDING operations are.

    Does nothing for step -1.
    """
    _, added, noted = turns
    asm: gl.constexpr = f"cp.async.bulk.wait_group {PENDING}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], gl.int32, False, 1)
    use = step + _PLACES  # no index is below 0
    place, phase = use % _PLACES, (use // _PLACES) & 1
    mbarrier.wait(noted.index(place), phase, pred=step >= 0)  # of the step before in this place
    mbarrier.arrive(added.index(place), count=1, pred=step >= 0)


@gluon.jit
def pass_turns(
    turns, semaphore_ptr, order, ranges, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ALIGNMENT: gl.constexpr,
):  # fmt: skip
    """One warp: leaves the tile's number in the semaphore of each step of the program's item that is in memory."""
    _, added, noted = turns
    n_heads = order[2] * GROUP
    found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    first, _, start, end, n_steps = found
    m, head = first_step(found, GROUP, BLOCK_M, True)
    for step in range(n_steps):
        place = step % _PLACES
        mbarrier.wait(added.index(place), (step // _PLACES) & 1)
        mbarrier.arrive(noted.index(place), count=1)
        _raise(semaphore_ptr + m // BLOCK_M * n_heads + head, first // BLOCK_N)
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M, True)


@gluon.jit
def _wait_for(semaphore, number):
    """For a single warp: waits until a semaphore is `number` or more; what was added before is then in memory."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; WAIT: ld.acquire.gpu.global.b32 x, [$1]; setp.lt.s32 p, x, $2; @p bra WAIT; "
        "fence.proxy.async.global; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)


@gluon.jit
def _raise(semaphore, number):
    """For a single warp: raises a semaphore to `number`, after all of which this warp knows that it is in memory."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 x; elect.sync x|p, -1; @p red.release.gpu.global.max.s32 [$1], $2; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r,~{memory}", [semaphore.to(gl.int64), number], gl.int32, False, 1)
