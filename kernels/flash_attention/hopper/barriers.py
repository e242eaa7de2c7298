"""Turns between the consumer warpgroups: while one holds the tensor cores, the others do their softmax.

The ping-pong of FlashAttention-3 (arXiv:2407.08608, section 3.1). Triton itself uses the hardware's named barriers 0
and 1 and one more for each worker partition; from 8 on they are free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
