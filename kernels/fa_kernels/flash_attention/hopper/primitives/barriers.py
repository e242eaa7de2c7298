"""Barriers between the warps of a program, and two operations of the async proxy that go with them.

A kernel must use every mbarrier that it allocates. If an mbarrier is only initialised, Triton gives its memory to
another buffer, and PTX forbids that before mbarrier.inval. When processes share a GPU in time slices, those 8 bytes can
become the mbarrier again.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# Numbers of the hardware's named barriers. Triton uses 0, 1 and one for each worker partition; 8 to 15 are free.
PINGPONG_BARRIER = gl.constexpr(8)  # forward: 8, 9 and 10, one for each consumer
HALVES_BARRIER = gl.constexpr(10)  # backward: the two warpgroups of an item
MARKS_BARRIER = gl.constexpr(11)  # 11 to 15: the warpgroups that call nan_marks.mark_rows for the same rows
WARPGROUP = gl.constexpr(128)  # threads
# Blocks a warpgroup until all its threads arrive. The name differs between Triton 3.6 and 3.7.
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _run(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    # Volatile and scalar, so that each thread of the partition runs it once. The result has no meaning.
    gl.inline_asm_elementwise(
        f"{INSTRUCTION} {BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1
    )


@gluon.jit
def named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Blocks until THREADS threads have reached the named barrier."""
    _run("bar.sync", BARRIER, THREADS)


@gluon.jit
def wait_pingpong(CONSUMER: gl.constexpr):
    """Blocks this consumer's warpgroup until the consumer before it calls `pass_pingpong`.

    With ping-pong, one consumer issues matmuls while the others compute their softmax (arXiv:2407.08608, section 3.1).
    """
    _run("barrier.cta.sync.aligned", PINGPONG_BARRIER + CONSUMER, 256)


@gluon.jit
def pass_pingpong(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer go on. Does not block."""
    _run("barrier.cta.arrive.aligned", PINGPONG_BARRIER + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def hand_back(empty):
    """Arrives at an mbarrier that counts WARPGROUP for each reader of a buffer: this warpgroup has read it.

    With mbarrier.arrive one thread arrives for all, and the warpgroup waits for its last warp. Here each thread arrives
    for itself, by cp.async's arrive instruction. It orders no stores: the buffer must only have been read, by matmuls
    and TMA that were waited for and by loads whose values were used.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def hand_over(full):
    """Arrives at an mbarrier that counts WARPGROUP for each writer of a buffer: this warpgroup has stored its part.

    The readers are matmuls and TMA, which use the async proxy. Each thread arrives for itself, so each first fences its
    stores, for that proxy and for the threads that wait.
    """
    fence_async_shared()
    gl.inline_asm_elementwise("fence.acq_rel.cta; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1)
    hand_back(full)


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory (cp.reduce.async.bulk.tensor). Wait with tma.store_wait.

    Triton 3.6 and 3.7 can build the operation but do not export it. Rows past the tensor's end are left out.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)
