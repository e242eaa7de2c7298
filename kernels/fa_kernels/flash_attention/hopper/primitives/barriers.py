"""Barriers between the warps of a program, and TMA's reduce-add.

A kernel must use every mbarrier that it allocates. If a kernel initialises an mbarrier, but then never uses it, Triton
can give the mbarrier's memory to another buffer. Without mbarrier.inval, PTX does not allow other uses of an mbarrier's
memory. If a buffer gets the memory of an mbarrier, 8 bytes of the buffer can change to the old value of the mbarrier
when the GPU switches between processes.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# Numbers of the hardware's named barriers. Triton uses barrier 0, barrier 1, and one barrier for each worker partition.
# All barriers of Triton have numbers below 8, so the numbers 8 to 15 are free.
PINGPONG_BARRIER = gl.constexpr(8)  # consumer i of the forward kernel waits at barrier 8 + i, where i is 0, 1 or 2
CONSUMERS_BARRIER = gl.constexpr(10)  # in the backward kernels, the two consumers of an item meet at this barrier
MARKS_BARRIER = gl.constexpr(11)  # nan_marks.mark_rows uses barriers 11 to 15
WARPGROUP = gl.constexpr(128)  # threads in a warpgroup
# meet() blocks a warpgroup until all its threads arrive. Triton 3.6 and 3.7 have different names for meet().
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _run(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    # The asm is volatile and scalar, so that each calling thread runs the asm once. The result of the asm is not used.
    gl.inline_asm_elementwise(
        f"{INSTRUCTION} {BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1
    )


@gluon.jit
def named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Blocks until `THREADS` threads have arrived at the named barrier `BARRIER`."""
    _run("bar.sync", BARRIER, THREADS)


@gluon.jit
def wait_pingpong(CONSUMER: gl.constexpr):
    """Blocks this consumer's warpgroup until the previous consumer calls `pass_pingpong`.

    Ping-pong means that one consumer issues matmuls while the others compute softmax (arXiv:2407.08608, section 3.1).
    """
    _run("barrier.cta.sync.aligned", PINGPONG_BARRIER + CONSUMER, 256)


@gluon.jit
def pass_pingpong(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer return from `wait_pingpong`. pass_pingpong itself does not block."""
    _run("barrier.cta.arrive.aligned", PINGPONG_BARRIER + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def hand_back(empty):
    """Signals through the mbarrier `empty` that this warpgroup has read a buffer.

    The mbarrier must expect `WARPGROUP` arrivals from each warpgroup that reads the buffer.
    Each thread arrives on its own, with cp.async's arrive instruction. Gluon's mbarrier.arrive is not used: it lets one
    thread arrive for the whole warpgroup, and this thread must wait for the slowest warp. hand_back does not make a
    thread's stores visible to other threads, so it cannot replace `hand_over`. Call hand_back only when all reads of
    the buffer are finished. Before the call, matmuls and TMA operations that read the buffer must be complete, and
    values that were loaded from the buffer must have been used.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def hand_over(full):
    """Signals through the mbarrier `full` that this warpgroup has written its part of a buffer.

    The mbarrier must expect `WARPGROUP` arrivals from each warpgroup that writes the buffer. Each thread arrives on its
    own, after it has fenced its stores. The fences make the stores visible to waiting threads and to the async proxy,
    through which matmuls and TMA read.
    """
    fence_async_shared()
    gl.inline_asm_elementwise("fence.acq_rel.cta; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1)
    hand_back(full)


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Starts to add a tile in shared memory to a tile in global memory (cp.reduce.async.bulk.tensor).

    tma.store_wait waits until TMA has read the tile. Rows past the end of the tensor are not written. Triton 3.6 and
    3.7 can build a TMA reduce-add, but have no public function for it.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)
