"""Runs the Hopper kernels with warps that sleep at random near every synchronisation, and saves the results.

    python -m tests.kernels.flash_attention.hopper.support.jittered FILE    # writes FILE.

Run the module in a new process, because a process reuses kernels that it has already compiled without the sleeps. At
each synchronisation, one warp in 8 sleeps for up to 4 us. If a kernel lacks a synchronisation, the sleeps can reorder
the kernel's reads and writes, and so change the results.
"""

import sys
from hashlib import sha256

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fa_kernels.flash_attention.hopper.backward import dq_order, fused_consumer, fused_dq, items, keys, queries, wide
from fa_kernels.flash_attention.hopper.backward.dq_order import _raise, _wait_for, note_added
from fa_kernels.flash_attention.hopper.forward import consumer, output
from fa_kernels.flash_attention.hopper.forward import items as forward_items
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.primitives import ring
from fa_kernels.flash_attention.hopper.primitives.barriers import hand_back, hand_over, named_barrier
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.queue import post, read, take
from tests.kernels.flash_attention.hopper.support.hopper import backward_problem, gradients, problem

MODULES = forward_items, consumer, output, keys, queries, items, fused_consumer, fused_dq, wide, dq_order, ring
RUNS = 3
DOCUMENTS = {"short": [64] * 150, "ragged": [700, 1, 300, 3000, 2000]}


@gluon.jit
def _sleep():
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 c, w, s; mov.u32 c, %clock; mov.u32 w, %warpid; mad.lo.u32 c, w, 40503, c;"
        " mul.lo.u32 c, c, 2654435761; shfl.sync.idx.b32 c, c, 0, 31, -1; shr.u32 w, c, 29; shr.u32 s, c, 12;"
        " and.b32 s, s, 4095; setp.eq.u32 p, w, 0; selp.b32 s, s, 0, p; nanosleep.u32 s; mov.u32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], gl.int32, False, 1)


@gluon.jit
def _hand_back(empty):
    _sleep()
    hand_back(empty)
    _sleep()


@gluon.jit
def _hand_over(full):
    _sleep()
    hand_over(full)
    _sleep()


@gluon.jit
def _fence():
    _sleep()
    fence_async_shared()
    _sleep()


@gluon.jit
def _named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    _sleep()
    named_barrier(BARRIER, THREADS)
    _sleep()


@gluon.jit
def _mark_rows(columns, first, head, total, marks_ptr, WARPGROUP: gl.constexpr, THREADS: gl.constexpr = 128):
    _sleep()
    mark_rows(columns, first, head, total, marks_ptr, WARPGROUP, THREADS)
    _sleep()


@gluon.jit
def _take(counter_ptr):
    _sleep()
    return take(counter_ptr)


@gluon.jit
def _post(queue, item_number, fields):
    _sleep()
    post(queue, item_number, fields)
    _sleep()


@gluon.jit
def _read(queue, item_number):
    _sleep()
    values = read(queue, item_number)
    _sleep()
    return values


@gluon.jit
def _wait_for_semaphore(semaphore, number):
    _sleep()
    _wait_for(semaphore, number)
    _sleep()


@gluon.jit
def _note_added(dq_order, step, PENDING: gl.constexpr):
    _sleep()
    note_added(dq_order, step, PENDING)
    _sleep()


@gluon.jit
def _raise_semaphore(semaphore, number):
    _sleep()
    _raise(semaphore, number)
    _sleep()


SLEEPING = {
    "hand_back": _hand_back,
    "hand_over": _hand_over,
    "fence_async_shared": _fence,
    "named_barrier": _named_barrier,
    "mark_rows": _mark_rows,
    "take": _take,
    "post": _post,
    "_wait_for": _wait_for_semaphore,
    "note_added": _note_added,
    "_raise": _raise_semaphore,
    "read": _read,
}


def let_warps_sleep():
    for name, sleeping in SLEEPING.items():
        users = [module for module in MODULES if hasattr(module, name)]
        assert users, f"no kernel has a {name}"
        for module in users:
            setattr(module, name, sleeping)


def calls():
    """Yields (name, function, arguments) for each call. The function is attention_forward or `gradients`.

    The arguments have the same values in every process.
    """
    for documents, lengths in DOCUMENTS.items():
        for head_dim in (64, 96, 128, 256):
            torch.manual_seed(0)
            yield f"forward-{head_dim}-{documents}", fwd.attention_forward, problem(lengths, head_dim)
            for deterministic in (False, True):
                for softcap in (0.0, 30.0) if head_dim < 128 else (0.0,):
                    kind = "deterministic" if deterministic else "backward"
                    one = backward_problem(lengths, lengths, head_dim, softcap=softcap, deterministic=deterministic)
                    yield f"{kind}-{head_dim}-{softcap:.0f}-{documents}", gradients, one


def outcomes(run, arguments, name):
    """Makes `RUNS` calls, and yields (hashes of the outputs, first head of dq or None) for each call.

    If a backward call is not deterministic, the bits of dq can change from run to run. In a non-deterministic backward
    call, dq is therefore not hashed, and the second item is the first head of dq. In all other calls, the second item
    is None.
    """
    for _ in range(RUNS):
        outputs = list(run(*arguments))
        any_order = outputs.pop(0)[:, 0].cpu() if name.startswith("backward") else None
        yield [sha256(x.cpu().contiguous().view(torch.uint8).numpy()).hexdigest() for x in outputs], any_order


if __name__ == "__main__":
    let_warps_sleep()
    torch.save({name: list(outcomes(run, arguments, name)) for name, run, arguments in calls()}, sys.argv[1])
