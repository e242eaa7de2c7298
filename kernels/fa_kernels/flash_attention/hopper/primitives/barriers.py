"""Turns between the consumer warpgroups, and how they hand buffers to others.

While one holds the tensor cores, the others do their softmax: the ping-pong of FlashAttention-3 (arXiv:2407.08608,
section 3.1).

A kernel must have no mbarrier that it does not use. Triton gives the place of one that is only initialised to another
buffer, and PTX forbids to use such memory otherwise before mbarrier.inval. As long as a GPU has one process nothing
comes of it. Where processes have it in turns, and one ends in the middle of a kernel, those 8 bytes were found to be
the mbarrier again (run 34 of scripts/results/hopper_kernels_h200_202611.md: they were dS, and dQ had NaN).
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# Numbers of the hardware's named barriers. Triton uses 0, 1 and one for each worker partition; 8 to 15 are free.
TURN_BARRIER = gl.constexpr(8)  # forward: 8, 9 and 10, one for each consumer
HALVES_BARRIER = gl.constexpr(10)  # backward: the two warpgroups of an item
MARKS_BARRIER = gl.constexpr(11)  # 11 to 15, one for each group of nan_marks.mark_rows
WARPGROUP = gl.constexpr(128)  # threads, each of which hands back
# blocks a warpgroup until all its threads are there; Triton 3.7 has another name for it
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _run(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    # volatile and scalar, so that every thread of the partition runs it once; the result is only there to have one
    gl.inline_asm_elementwise(
        f"{INSTRUCTION} {BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1
    )


@gluon.jit
def named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Blocks until THREADS threads have reached the named barrier."""
    _run("bar.sync", BARRIER, THREADS)


@gluon.jit
def wait_turn(CONSUMER: gl.constexpr):
    """Blocks this consumer's four warps until the one before it has passed the turn on."""
    _run("barrier.cta.sync.aligned", TURN_BARRIER + CONSUMER, 256)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer go on; does not block."""
    _run("barrier.cta.arrive.aligned", TURN_BARRIER + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def hand_back(empty):
    """Arrives at an mbarrier that counts WARPGROUP for each reader of a buffer: this warpgroup has read it.

    mbarrier.arrive lets one thread arrive for all, so it holds the warpgroup up until its last warp is there, and
    Triton puts such a barrier before the next product too. Here each thread arrives for itself, by the instruction for
    its copies by cp.async, of which it has none. That orders nothing that a thread has stored: it is for buffers that
    have only been read, by products and TMA that have been waited for and by loads whose values have been used.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def hand_over(full):
    """Arrives at an mbarrier that counts WARPGROUP for each writer of a buffer: this warpgroup has stored its part.

    For products and TMA, which read it by the async proxy. Each thread arrives for itself, as in `hand_back`, which
    orders nothing: so each first fences what it has stored, for that proxy and then for whoever waits.
    """
    fence_async_shared()
    gl.inline_asm_elementwise("fence.acq_rel.cta; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1)
    hand_back(full)


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory: cp.reduce.async.bulk.tensor, waited for by tma.store_wait.

    Triton 3.6 and 3.7 build the operation but do not export it. Rows past the tensor's end are left out.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)
