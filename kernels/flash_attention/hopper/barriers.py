"""Turns between the consumer warpgroups, and how they hand a buffer back to those that fill it.

While one holds the tensor cores, the others do their softmax: the ping-pong of FlashAttention-3 (arXiv:2407.08608,
section 3.1). Triton itself uses the hardware's named barriers 0 and 1 and one more for each worker partition; from 8 on
they are free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPGROUP = gl.constexpr(128)  # threads, each of which hands back


@gluon.jit
def _named_barrier(OPERATION: gl.constexpr, ID: gl.constexpr, THREADS: gl.constexpr):
    # volatile and scalar, so that every thread of the partition runs it once; the result is only there to have one
    gl.inline_asm_elementwise(
        f"barrier.cta.{OPERATION}.aligned {ID}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1
    )


@gluon.jit
def wait_turn(CONSUMER: gl.constexpr):
    """Blocks this consumer's four warps until the one before it has passed the turn on."""
    _named_barrier("sync", 8 + CONSUMER, 256)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer go on; does not block."""
    _named_barrier("arrive", 8 + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def hand_back(empty):
    """Arrives at an mbarrier that counts WARPGROUP for each reader of a buffer: this warpgroup has read it.

    mbarrier.arrive lets one thread arrive for all, so it holds the warpgroup up until its last warp is there, and
    Triton puts such a barrier before the next product too. Here each thread arrives for itself, by the instruction for
    its copies by cp.async, of which it has none. That orders no writes of other threads: it is for buffers that have
    only been read, by products that have been waited for and by loads whose values have been used.
    """
    async_copy.mbarrier_arrive(empty, increment_count=False)
