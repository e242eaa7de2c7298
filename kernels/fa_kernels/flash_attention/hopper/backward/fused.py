"""The backward pass in one kernel of five matmuls, dQ by a warpgroup of its own, for Hopper.

An item of work is 128 keys of a KV head. In each step, a block of queries of one head:

- two warpgroups, 64 keys each: S^T = K Q^T, P^T, dP^T = V dO^T, dS^T, then dV and dK with P^T and dS^T as operands in
  registers. They put dS^T into a ring of shared tiles [keys, queries], rounded once, and wait for each other nowhere;
- the third: dQ = dS K of all 128 keys, 64 rows by 64 columns at a time, each added to fp32 in global memory by TMA. The
  order of those additions varies from run to run, unless tiles take turns (order.py), for which this group alone waits;
  dK and dV have one owner and are repeatable. What is added lies in memory as threads hold it (registers.py), as
  FlashAttention-4 has it, so blocks of queries begin at multiples of 64.

Where two warpgroups shared dQ, as they first did, they met in every step, and neither had products in flight while it
added. Here that is behind the others' next step. In fp16 at 128 softcap's factor of dS, as many registers again as P,
spills: 9.9 ms at 16k, where two kernels of seven matmuls take 7.1 (bwd.py).

A program works one item or, if its tiles are dynamic, takes one after another from a queue (queue.py). Beside its
steps, of 1.2 us each at head_dim 64, a program takes 5.4 us to begin and to end: a fifth of the time of documents of
2k. A queue hides that: K and V have two places, so the producer loads those of the next item, and its first Q and dO,
while the consumers still work, and dK and dV leave from the one place while the other is worked. At 64, plain and so:
2k 368 and 437 TFLOP/s, short documents 129 and 168, 8k with four heads a KV head 519 and 540, 32k 532 and 544; at 96 2k
407 and 428, short 149 and 159 (run 30 of scripts/results/hopper_kernels_h200_202611.md, which has all that is said to
be measured here). At 128 there is no room for a second K and V, and with one place nothing was gained. Where dS in fp32
or softcap needs the registers, the loops over steps spill, and long documents lose what short ones gain: those are
plain, but for fp16 at 96, and at 64 with softcap.

A head_dim of 96 is worked as 64 columns and 32, each with buffers, descriptors and accumulators of its own, because
Triton's blocks are powers of two: padded to 128 it would pay for a third more of every product.

Barriers, each of every place: kv_full, q_full and do_full of TMA's bytes; kv_empty, that dK and dV have left; empty,
that both consumers have read Q and dO; ds_full, that both have written dS^T; ds_empty, that dQ's products have read it.
Nothing waits in a circle. Count the steps of all items of a program in a row. dS of step j needs Q and dO of step j,
AHEAD Q of step j + 1 too if that is of the same item, and, in the ring, dQ of step j - DS_STAGES; dQ of step j needs dS
of step j and its own earlier sums out of their buffers; Q and dO of step j need the consumers done with step j -
STAGES, and all that is loaded for earlier ones. So the least step that is not done can always go on: AHEAD too, as Q of
step j + 1 waits for step j + 1 - STAGES alone, which with STAGES >= 2 comes before j. K and V of an item need the
consumers to have begun the item before it, with dK and dV of the one before that gone, for which they wait then. At an
item's end dK and dV overwrite K and V, dK once ds_empty says that dQ's last products have read K. Where tiles take
turns, dQ of step j needs its turn too, which waits for other programs and dQ of step j - DS_STAGES, and that the sums
of step j - 3 are noted, which waits for nothing.

Registers of a thread (64K for a program): 208 of the consumers, 72 of dQ's group, 24 of the producer. ptxas puts
accumulators at R24 and above and leaves out the last two registers of each group (read off its code and its refusals,
alike in Triton 3.6 and 3.7). So dK, dV, S and dP of head_dim 128 in flight together, 192 accumulators, do not fit:
24 + 192 + 2 > 208, and ptxas would serialise every product (C7512). Nor do those of 128 queries at head_dim 64, which
are as many. Hence dP's product begins when S has become P. Likewise dQ has 64 x 64, 32 accumulators: 24 + 32 + 2 is
more than 56, with which ptxas ignores the counts of all groups (C7507); and 64 x 128, which would read dS^T once rather
than twice, would take too many from the consumers.

HALVES, for bf16, multiplies P, softcap's factor and dP - delta in 16 bits: P has been rounded for dV anyway, so nothing
of S lives in fp32 while dP is computed, and the product takes half the instructions. That costs accuracy, three
roundings of dS for one: of the exact dq and dk they are at head_dim 128 3.4e-3 off (root mean square) rather than
2.4e-3, where torch's own bf16 is 5e-3 to 2e-2 off (2048 tokens, normal q, k, v and do); at 64 they differ from those of
dS in fp32 by 4.0e-3. With softcap they are 3.8e-3 and 4.0e-3 off, torch 5.6e-3 to 6.9e-3 (1024 tokens, a cap of 30).
fp16, which could overflow, keeps fp32.

AHEAD, for bf16 at head_dim 64 and 96, gives the tensor cores work while a step computes: dP beside the exponentials,
and S of the next step, begun after them, beside dS. At 64 it is begun only when dP is there: of four heads, 16k 558
TFLOP/s for 534, 128k 561 for 547, 2k 427 for 409 (run 22); of one, dynamic, 16k sustained 521 for 509, not causal 548
for 531 (run 30). At 96 it is better begun at once: of four heads, 64k 540 for 500 (run 28). S is waited for with dV and
dK, so nothing is in flight from one step to the next. It takes 64 queries a step: dK, dV, S and dP are then at 64 32
registers each, and with HALVES there is room for this warpgroup's rows of K and V too, 16 each, so that shared memory
is read for them once, not in every step; at 96, where dK and dV take 48 each, there is none. After an item's last step
it multiplies Q of a stage that is stale, was never filled or is being filled, and drops the result. Of 128 queries
neither fits, dP beside S nor K and V. With dS in fp32 it gained nothing: 508 TFLOP/s for 514 at 16k, at 96 458 for 493.
At 96 with softcap it spills more and loses: of one head, 16k 461 for 495 of dS in fp32 without it, of four 523 for 522.

When lse and delta are read matters as much; which is better was only measured (run 29). lse before the first product of
a step gives 96 2 to 7% over lse after it; before S is waited for, with delta before dP is, it gives 128 with HALVES up
to 4%, with four heads a KV head -0.5% (in bursts) to 3%. At 64 delta so takes up to 15%, and lse gives 3% to documents
of 2k, but takes 4% from 16k not causal and from 8k with four heads a KV head. At 96 with softcap and four heads a KV
head lse before S is waited for takes 12%.

In bf16 without softcap every thread hands dS over for itself (barriers.hand_over): one barrier of the warpgroup is left
in a step, which Triton puts there, where mbarrier.arrive, by one thread for all, had three. With four heads a KV head
8k has 542 TFLOP/s so for 525, 32k sustained 1% more, 128 at 16k 620 for 605. fp16 is 1 to 3% slower so, and softcap
with four heads 7% (run 31).

TFLOP/s of an H200 in November 2026, causal bf16, all kernels of the pass, medians of one run (b852165):

| head_dim, heads / KV heads, tokens of a document | cuDNN | FlashAttention-4 | this |
|:-------------------------------------------------|------:|-----------------:|-----:|
| 64, 32 / 32, 16k                                 | 413   | 565              | 563  |
| 64, 32 / 32, 2k                                  | 314   | 407              | 435  |
| 64, 32 / 8, 8k                                   | 385   | 494              | 552  |
| 64, 32 / 32, log-normal; short                   |       | 479; 109         | 495; 155 |
| 96, 21 / 21, 16k                                 | 392   | 550              | 576  |
| 96, 21 / 21, 2k                                  | 315   | 424              | 432  |
| 96, 20 / 5, 8k                                   | 387   | 520              | 507  |
| 96, 21 / 21, log-normal; short                   |       | 534; 130         | 515; 144 |
| 128, 16 / 16, 16k                                | 532   | 612              | 617  |
| 128, 16 / 16, 2k                                 | 403   | 470              | 467  |
| 128, 16 / 4, 8k                                  | 465   | 541              | 610  |
| 128, 16 / 16, log-normal; short                  |       | 555; 151         | 575; 159 |

Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608, section 3.1.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import LOG2_E, ceil_div, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.dq_sum import Prepared
from fa_kernels.flash_attention.hopper.backward.items import (
    BLOCK_N,
    SIZES,
    SUM_BLOCK,
    decode,
    first_step,
    new_barriers,
    new_buffers,
    new_rest_buffers,
    next_step,
    produce,
    product,
    seen_by,
)
from fa_kernels.flash_attention.hopper.backward.order import await_turns, new_turns, note_added, pass_turns
from fa_kernels.flash_attention.hopper.primitives.barriers import (
    HALVES_BARRIER,
    WARPGROUP,
    hand_back,
    hand_over,
    meet,
    named_barrier,
    tma_reduce_add,
)
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.queue import field, five_fields, new_queue, programs_of, read
from fa_kernels.flash_attention.hopper.primitives.registers import in_order_of_threads, keep_columns
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.tile_order import kv_heads_per_section
from fa_kernels.launch.descriptors import columns_of_heads, elements, rows_of_heads
from fa_kernels.launch.record import launch

SUMS = gl.constexpr(2)  # pieces of dQ on their way to memory
REGISTERS = 128  # of a thread when the kernel starts
GROUP_REGISTERS = (208, 72, 24)  # then, of the second consumer, dQ's group and the producer; the first gets the rest
ORDERED_REGISTERS = (*GROUP_REGISTERS, 24, 24)  # and of the two warps of order.py


@dataclass(frozen=True)
class ThreeGroupTiles:
    """block_m queries a step; stages of Q and dO, and of dS^T, in flight; HALVES and AHEAD of the kernel.

    dynamic: whether programs take their items from a queue.
    """

    block_m: int
    stages: int
    ds_stages: int
    dynamic: bool
    halves: bool
    ahead: bool


# by head_dim and dtype; 193 to 227 KiB of shared memory. Half the queries leave room for twice the stages
TILES = {
    (64, torch.bfloat16): ThreeGroupTiles(64, 4, 2, dynamic=True, halves=True, ahead=True),
    (64, torch.float16): ThreeGroupTiles(128, 2, 2, dynamic=False, halves=False, ahead=False),
    (96, torch.bfloat16): ThreeGroupTiles(64, 3, 2, dynamic=True, halves=True, ahead=True),
    (96, torch.float16): ThreeGroupTiles(64, 3, 2, dynamic=True, halves=False, ahead=False),
    (128, torch.bfloat16): ThreeGroupTiles(64, 2, 2, dynamic=False, halves=True, ahead=False),
    (128, torch.float16): ThreeGroupTiles(64, 2, 2, dynamic=False, halves=False, ahead=False),
}
# with softcap; in fp16 its factor of dS leaves no registers for 128 queries at 64, and none at 128, nor in bf16 any for
# AHEAD at 96
_CAPPED_96 = ThreeGroupTiles(64, 3, 3, dynamic=False, halves=False, ahead=False)
CAPPED_TILES = {
    (64, torch.bfloat16): ThreeGroupTiles(64, 4, 4, dynamic=False, halves=True, ahead=True),
    (64, torch.float16): ThreeGroupTiles(64, 4, 2, dynamic=True, halves=False, ahead=False),
    (96, torch.bfloat16): _CAPPED_96,
    (96, torch.float16): _CAPPED_96,
    (128, torch.bfloat16): TILES[128, torch.bfloat16],
}


def tiles_of(head_dim: int, dtype: torch.dtype, softcap: float, ordered: bool = False) -> ThreeGroupTiles | None:
    """What `gradients_of_keys` takes; None where such a call is not for it. ordered: whether tiles take turns."""
    tiles = (CAPPED_TILES if softcap else TILES).get((head_dim, dtype))
    if tiles is not None and ordered:  # those of 128 queries, of fp16 at 64, would wait for one another in a chain
        return _in_turns(CAPPED_TILES[head_dim, dtype] if tiles.block_m > SUM_BLOCK else tiles)
    return tiles


@cache
def _in_turns(tiles):
    """The same for order.py, where a program has one item: in a queue it would wait for a program that is not there."""
    return replace(tiles, dynamic=False)


@gluon.constexpr_function
def _handed_over_by(halves, softcap):
    """How many threads of a warpgroup arrive when it has stored its half of dS."""
    return WARPGROUP.value if halves and not softcap else 1


@gluon.jit
def _consume_item(
    found, turn, done, HALF: gl.constexpr, out_desc, out_2_desc, work, HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr,
    D_2: gl.constexpr, HALVES: gl.constexpr, AHEAD: gl.constexpr, BACKWARDS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of half an item's keys, and that half of dS^T for dQ. HALF 0 writes dK, 1 dV.

    found: what `decode` finds of the program's item number `turn`; done: the steps of the items before it. Returns the
    steps done. work: what both halves share, as `_bwd_kernel` has it. BACKWARDS: the order of the steps (`next_step`).
    """
    buffers, rest_bufs, barriers, ring, ranges, spoiled_ptr, softmax_scale, softcap = work
    q_bufs, do_bufs, lse_bufs, delta_bufs, k_bufs, v_bufs = buffers
    kv_full, kv_empty, q_full, do_full, empty = barriers
    ds_bufs, ds_full, ds_empty = ring
    STAGES: gl.constexpr = q_bufs.shape[0]
    DS_STAGES: gl.constexpr = ds_bufs.shape[0]
    ITEMS: gl.constexpr = k_bufs.shape[0]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    D: gl.constexpr = q_bufs.shape[2]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    KEYS: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = q_bufs.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout, k_width=2)
    keys_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores_layout, k_width=2)
    queries_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    AFTER_DP: gl.constexpr = AHEAD and D_2 == 0  # when S of the next step is begun
    # before S and dP are waited for, where that is faster; AHEAD has a place of its own for lse
    LSE_EARLY: gl.constexpr = not (D_2 and HAS_SOFTCAP and GROUP > 1)
    DELTA_EARLY: gl.constexpr = HALVES and not AHEAD and not HAS_SOFTCAP
    PARTS: gl.constexpr = 2 if D_2 else 1  # matmuls of which one operation of a head is made
    # products begun after dP's, which go on when dP is there: S of the next step, dV
    LATER: gl.constexpr = (PARTS if AHEAD and not AFTER_DP else 0) + (PARTS if HALVES else 0)
    first, kv_head, start, end, n_steps = found
    m, head = first_step(found, GROUP, BLOCK_M, BACKWARDS)
    stop = done + n_steps
    place = turn % ITEMS
    k_buf, v_buf = k_bufs.index(place), v_bufs.index(place)
    first_here = first + HALF * KEYS
    query_start, query_end, whole_start, whole_end = seen_by(ranges, first_here, KEYS, gl.SliceLayout(1, scores_layout))
    k_half = k_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D]
    v_half = v_buf.slice(HALF * KEYS, KEYS, dim=0)
    COUNTED: gl.constexpr = STAGES & (STAGES - 1) != 0  # stages: a division by three takes registers
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=scores_layout)
    dk = gl.zeros([KEYS, D], gl.float32, layout=kv_layout)
    dv = gl.zeros([KEYS, D], gl.float32, layout=kv_layout)
    if D_2:
        q_2_bufs, do_2_bufs, k_2_bufs, v_2_bufs = rest_bufs
        k_2_buf, v_2_buf = k_2_bufs.index(place), v_2_bufs.index(place)
        k_half_2 = k_2_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D_2]
        v_half_2 = v_2_buf.slice(HALF * KEYS, KEYS, dim=0)
        kv_layout_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2, 16])
        operand_layout_2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout_2, k_width=2)
        dk_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
        dv_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
    stage, phase = done % STAGES, (done // STAGES) & 1
    mbarrier.wait(kv_full.index(place), (turn // ITEMS) & 1)
    k_operand = k_half.load(keys_layout) if AHEAD and not D_2 else k_half
    v_operand = v_half.load(keys_layout) if AHEAD and not D_2 else v_half
    if AHEAD:
        mbarrier.wait(q_full.index(stage), phase, pred=n_steps > 0)
        scores = warpgroup_mma(k_operand, q_bufs.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if D_2:
            scores = warpgroup_mma(k_half_2, q_2_bufs.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    if ITEMS > 1:
        if turn > 0:  # by now dK and dV of the item before have left
            tma.store_wait(0)
            hand_back(kv_empty.index((turn - 1) % ITEMS))
    meet()  # or Triton, for what was waited for above, puts such a barrier into every step
    for step in range(done, stop):
        if not COUNTED:
            stage, phase = step % STAGES, (step // STAGES) & 1
        if DS_STAGES == STAGES:
            ds_stage, ds_phase = stage, phase
        else:
            ds_stage, ds_phase = step % DS_STAGES, (step // DS_STAGES) & 1
        q, do = q_bufs.index(stage), do_bufs.index(stage)  # [M, D]
        if D_2:
            q_2, do_2 = q_2_bufs.index(stage), do_2_bufs.index(stage)  # [M, D_2]
        if AHEAD:  # S is there from the step before
            if D_2:
                lse = lse_bufs.index(stage).load(queries_layout)
            mbarrier.wait(do_full.index(stage), phase)
            dp = warpgroup_mma(v_operand, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [64, M]
            if D_2:
                dp = warpgroup_mma(v_half_2, do_2.permute((1, 0)), dp, is_async=True)
            else:
                lse = lse_bufs.index(stage).load(queries_layout)
        else:
            mbarrier.wait(q_full.index(stage), phase)
            scores = warpgroup_mma(k_operand, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [64, M]
            if D_2:
                scores = warpgroup_mma(k_half_2, q_2.permute((1, 0)), scores, is_async=True)
            if LSE_EARLY:
                lse = lse_bufs.index(stage).load(queries_layout)
            mbarrier.wait(do_full.index(stage), phase)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if not LSE_EARLY:
                lse = lse_bufs.index(stage).load(queries_layout)
        lse = gl.expand_dims(lse, 0)
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            p = gl.exp2(scores - lse)
        else:
            p = gl.exp2(scores * (softmax_scale * LOG2_E) - lse)
        if (m < whole_start) | (m + BLOCK_M > whole_end):
            p = keep_columns(p, query_start - m, query_end - m, 0.0)
        p_low = p.to(dtype)
        if HAS_SOFTCAP and HALVES:
            p_sloped = product(p_low, (1.0 - t * t).to(dtype))
        elif HAS_SOFTCAP:
            p = p * (1.0 - t * t)
        following = step + 1
        if COUNTED:
            next_stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            next_phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        else:
            next_stage, next_phase = following % STAGES, (following // STAGES) & 1
        if AHEAD:  # S of the next step; past the last one of whatever the buffer holds, and nobody reads it
            q_next = q_bufs.index(next_stage)
            mbarrier.wait(q_full.index(next_stage), next_phase, pred=following < stop)
            if not AFTER_DP:
                scores = warpgroup_mma(k_operand, q_next.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                if D_2:
                    q_2_next = q_2_bufs.index(next_stage)
                    scores = warpgroup_mma(k_half_2, q_2_next.permute((1, 0)), scores, is_async=True)
        else:  # only now, as there are no registers for S and dP together
            dp = warpgroup_mma(v_operand, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if D_2:
                dp = warpgroup_mma(v_half_2, do_2.permute((1, 0)), dp, is_async=True)
        if HALVES:
            dv = warpgroup_mma(gl.convert_layout(p_low, operand_layout), do, dv, is_async=True)
            if D_2:
                dv_2 = warpgroup_mma(gl.convert_layout(p_low, operand_layout_2), do_2, dv_2, is_async=True)
        if DELTA_EARLY:
            delta = delta_bufs.index(stage).load(queries_layout)
        if AFTER_DP:  # no wait between S and dS, so that ptxas mixes them
            mbarrier.wait(ds_empty.index(ds_stage), ds_phase ^ 1)
            dp = warpgroup_mma_wait(LATER, deps=[dp])
            scores = warpgroup_mma(k_operand, q_next.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        else:
            dp = warpgroup_mma_wait(LATER, deps=[dp])
            mbarrier.wait(ds_empty.index(ds_stage), ds_phase ^ 1)
        if not DELTA_EARLY:
            delta = delta_bufs.index(stage).load(queries_layout)
        delta = gl.expand_dims(delta, 0)
        if HALVES:
            ds = product(p_sloped if HAS_SOFTCAP else p_low, (dp - delta).to(dtype))
        else:
            ds = (p * (dp - delta)).to(dtype)
        ds_bufs.index(ds_stage).slice(HALF * KEYS, KEYS, dim=0).store(ds)
        if _handed_over_by(HALVES, HAS_SOFTCAP) == WARPGROUP:
            hand_over(ds_full.index(ds_stage))
        else:
            fence_async_shared()
            mbarrier.arrive(ds_full.index(ds_stage), count=1)
        if not HALVES:  # there were no registers for its operand beside P
            dv = warpgroup_mma(gl.convert_layout(p_low, operand_layout), do, dv, is_async=True)
            if D_2:
                dv_2 = warpgroup_mma(gl.convert_layout(p_low, operand_layout_2), do_2, dv_2, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout), q, dk, is_async=True)
        if D_2:
            dk_2 = warpgroup_mma(gl.convert_layout(ds, operand_layout_2), q_2, dk_2, is_async=True)
        if D_2 and AHEAD:
            scores, dv, dv_2, dk, dk_2 = warpgroup_mma_wait(0, deps=[scores, dv, dv_2, dk, dk_2])
        elif D_2:
            dv, dv_2, dk, dk_2 = warpgroup_mma_wait(0, deps=[dv, dv_2, dk, dk_2])
        elif AHEAD:
            scores, dv, dk = warpgroup_mma_wait(0, deps=[scores, dv, dk])
        else:
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        hand_back(empty.index(stage))
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M, BACKWARDS)
        if COUNTED:
            stage, phase = next_stage, next_phase
    if spoiled_ptr is not None:
        sums_2 = dk_2 + dv_2 if D_2 else None
        mark_rows(dk + dv, sums_2, first_here, kv_head, ranges[2], spoiled_ptr, HALF)
    # dK and dV leave through the buffers of K and V, once all warps here have read their half; dQ reads K until it has
    # done the last step
    meet()
    v_half.store(dv.to(dtype))
    if D_2:
        v_half_2.store(dv_2.to(dtype))
    final = stop - 1
    mbarrier.wait(ds_empty.index(final % DS_STAGES), (final // DS_STAGES) & 1, pred=n_steps > 0)
    k_half.store((dk * softmax_scale).to(dtype))
    if D_2:
        k_half_2.store((dk_2 * softmax_scale).to(dtype))
    fence_async_shared()
    named_barrier(HALVES_BARRIER, 256)  # both halves are there
    tma.async_copy_shared_to_global(out_desc, [first, kv_head * (D + D_2)], k_buf if HALF == 0 else v_buf)
    if D_2:
        tma.async_copy_shared_to_global(out_2_desc, [first, kv_head * (D + D_2)], k_2_buf if HALF == 0 else v_2_buf)
    return stop


@gluon.jit
def _consume(
    HALF: gl.constexpr, out_desc, out_2_desc, work, order, queue, HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr,
    D_2: gl.constexpr, ALIGNMENT: gl.constexpr, HALVES: gl.constexpr, AHEAD: gl.constexpr, BACKWARDS: gl.constexpr,
):  # fmt: skip
    """`_consume_item` of the program's item, or of every item of the queue if there is one."""
    buffers, _, _, _, ranges, _, _, _ = work
    BLOCK_M: gl.constexpr = buffers[0].shape[1]
    BLOCK_N: gl.constexpr = buffers[4].shape[1]
    if queue is None:
        found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _consume_item(found, 0, 0, HALF, out_desc, out_2_desc, work, HAS_SOFTCAP, GROUP, D_2, HALVES, AHEAD, BACKWARDS)
    else:
        turn, done = 0, 0
        item = read(queue, turn)
        while field(item, 0) >= 0:
            found = five_fields(item)
            done = _consume_item(
                found, turn, done, HALF, out_desc, out_2_desc, work, HAS_SOFTCAP, GROUP, D_2, HALVES, AHEAD, BACKWARDS
            )
            turn += 1
            item = read(queue, turn)
    tma.store_wait(0)


@gluon.jit
def _sum_item(found, turn, done, sums, ring, n_heads, turns, GROUP: gl.constexpr, D_2: gl.constexpr):
    """One warpgroup: dQ of each step of an item, added to what sum_desc describes; `rest` is the same of D_2 columns.

    found, turn, done and what is returned are as of `_consume_item`, sums as `_bwd_kernel` has it. turns is None, or
    barriers of order.py, and then this is the program's only item.
    """
    sum_desc, sum_bufs, k_bufs, rest, kv_full = sums
    ds_bufs, ds_full, ds_empty = ring
    if turns is not None:
        due, _, _ = turns
    STAGES: gl.constexpr = ds_bufs.shape[0]
    BLOCK_M: gl.constexpr = ds_bufs.shape[2]
    ITEMS: gl.constexpr = k_bufs.shape[0]
    D: gl.constexpr = k_bufs.shape[2]
    SIDE: gl.constexpr = sum_bufs.shape[1] // 2  # of a piece of dQ
    ROWS_EACH: gl.constexpr = 2 * (D + D_2)  # of what sum_desc describes: 64 queries of a head
    ACROSS: gl.constexpr = D // SIDE
    PIECES: gl.constexpr = BLOCK_M // SIDE * ACROSS
    PLACES: gl.constexpr = sum_bufs.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    _, _, start, end, n_steps = found
    m, head = first_step(found, GROUP, BLOCK_M, turns is not None)
    stop = done + n_steps
    place = turn % ITEMS
    k_buf = k_bufs.index(place)
    no_dq = gl.zeros([SIDE, SIDE], gl.float32, layout=layout)
    if D_2:
        gl.static_assert(BLOCK_M == SIDE)
        sum_2_desc, sum_2_buf, k_2_bufs = rest
        k_2_buf = k_2_bufs.index(place)
        layout_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2, 16])
        no_dq_2 = gl.zeros([SIDE, D_2], gl.float32, layout=layout_2)
    # an item without steps may be over for the others, and K of the next but one there, before this is asked
    mbarrier.wait(kv_full.index(place), (turn // ITEMS) & 1, pred=n_steps > 0)
    for step in range(done, stop):
        stage, phase = step % STAGES, (step // STAGES) & 1
        ds_buf = ds_bufs.index(stage)  # [N, M]
        if turns is not None:
            mbarrier.wait(due.index(stage), phase)
        mbarrier.wait(ds_full.index(stage), phase)
        for piece in gl.static_range(PIECES):
            ds_rows = ds_buf.slice(piece // ACROSS * SIDE, SIDE, dim=1).permute((1, 0))
            k_columns = k_buf.slice(piece % ACROSS * SIDE, SIDE, dim=1)
            dq = warpgroup_mma(ds_rows, k_columns, no_dq, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            if piece == PIECES - 1 and not D_2:
                hand_back(ds_empty.index(stage))
            sum_buf = sum_bufs.index((PIECES * step + piece) % PLACES)
            tma.store_wait(SUMS - 1)  # the sum before in this buffer has left it
            sum_buf.store(in_order_of_threads(dq))
            fence_async_shared()
            unit = m // SIDE + piece // ACROSS
            row = (unit * n_heads + head) * ROWS_EACH + piece % ACROSS * 2 * SIDE
            tma_reduce_add(sum_desc, [row, 0], sum_buf)
        if D_2:
            dq_2 = warpgroup_mma(ds_buf.permute((1, 0)), k_2_buf, no_dq_2, use_acc=False, is_async=True)
            dq_2 = warpgroup_mma_wait(0, deps=[dq_2])
            hand_back(ds_empty.index(stage))
            tma.store_wait(SUMS - 1)
            sum_2_buf.store(in_order_of_threads(dq_2))
            fence_async_shared()
            row = (m // SIDE * n_heads + head) * ROWS_EACH + 2 * D
            tma_reduce_add(sum_2_desc, [row, 0], sum_2_buf)
        if turns is not None:  # what this step adds is still on its way
            note_added(turns, step - 1, PIECES + (1 if D_2 else 0))
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M, turns is not None)
    if turns is not None:
        note_added(turns, stop - 1, 0)
    return stop


@gluon.jit
def _sum_queries(
    sums, ring, order, ranges, queue, turns, GROUP: gl.constexpr, D_2: gl.constexpr, ALIGNMENT: gl.constexpr
):  # fmt: skip
    """`_sum_item` of the program's item, or of every item of the queue if there is one."""
    BLOCK_M: gl.constexpr = ring[0].shape[2]
    BLOCK_N: gl.constexpr = ring[0].shape[1]
    n_heads = order[2] * GROUP
    if queue is None:
        found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _sum_item(found, 0, 0, sums, ring, n_heads, turns, GROUP, D_2)
    else:
        turn, done = 0, 0
        item = read(queue, turn)
        while field(item, 0) >= 0:
            found = five_fields(item)
            done = _sum_item(found, turn, done, sums, ring, n_heads, turns, GROUP, D_2)
            turn += 1
            item = read(queue, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, sum_desc,
    q_2_desc, k_2_desc, v_2_desc, do_2_desc, dk_2_desc, dv_2_desc, sum_2_desc,
    counter_ptr, tiles_ptr, semaphore_ptr, query_start_ptr, query_end_ptr, spoiled_ptr, softmax_scale, softcap,
    n_items, n_tiles, n_kv_heads, section, total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, ALIGNMENT: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, HALVES: gl.constexpr, AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """An item: 128 keys of one KV head, over all query heads that share it.

    Program i works item i, and then others if there is a counter of them. Without tiles_ptr items are tiles in the
    order of the stream, and with semaphores, which it then needs, they add to dQ in that order, queries backwards.
    Descriptors of the first columns of each head, and with a 2 of the D_2 after them (None where D_2 is 0).
    padded_q is the length of a head's lse and delta. spoiled_ptr is None, or where to mark NaN in dK and dV
    (nan_marks.py).
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    ITEMS: gl.constexpr = 1 if counter_ptr is None else 2
    buffers = new_buffers(q_desc, k_desc, v_desc, do_desc, rows_desc, STAGES, ITEMS)
    barriers = new_barriers(STAGES, ITEMS)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds_bufs = gl.allocate_shared_memory(q_desc.dtype, [DS_STAGES, BLOCK_N, BLOCK_M], ds_layout)
    SUM_ROWS: gl.constexpr = sum_desc.block_type.shape[0]
    PLACES: gl.constexpr = 1 if D_2 else SUMS  # both parts are on their way at once
    sum_bufs = gl.allocate_shared_memory(gl.float32, [PLACES, SUM_ROWS, 32], sum_desc.layout)
    rest_bufs, rest_sums, queue, turns = None, None, None, None
    if counter_ptr is not None:
        queue = new_queue(3)
    if D_2:
        rest_bufs = new_rest_buffers(q_2_desc, k_2_desc, v_2_desc, do_2_desc, STAGES, ITEMS)
        sum_2_buf = gl.allocate_shared_memory(gl.float32, [2 * D_2, 32], sum_2_desc.layout)
        rest_sums = (sum_2_desc, sum_2_buf, rest_bufs[2])
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(stage), count=2 * _handed_over_by(HALVES, HAS_SOFTCAP))
        mbarrier.init(ds_empty.index(stage), count=WARPGROUP)
    ring = (ds_bufs, ds_full, ds_empty)
    if semaphore_ptr is not None:
        turns = new_turns(DS_STAGES)
    order = (tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = (query_start_ptr, query_end_ptr, total_k)
    loads = (
        (q_desc, k_desc, v_desc, do_desc), (q_2_desc, k_2_desc, v_2_desc, do_2_desc), rows_desc,
        (stride_qh, stride_kh, stride_vh, stride_doh), padded_q, n_kv_heads * GROUP * padded_q,
    )  # fmt: skip
    work = (buffers, rest_bufs, barriers, ring, ranges, spoiled_ptr, softmax_scale, softcap)
    sums = (sum_desc, sum_bufs, buffers[4], rest_sums, barriers[0])
    # two lists, since neither functions nor constants come out of a variable as they went in
    if semaphore_ptr is None:
        gl.warp_specialize([
            (_consume, (0, dk_desc, dk_2_desc, work, order, queue, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD,
                        False)),
            (_consume, (1, dv_desc, dv_2_desc, work, order, queue, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD,
                        False)),
            (_sum_queries, (sums, ring, order, ranges, queue, turns, GROUP, D_2, ALIGNMENT)),
            (produce, (loads, buffers, rest_bufs, barriers, order, ranges, queue, counter_ptr, n_items, GROUP,
                       ALIGNMENT)),
        ], [4, 4, 1], REGISTERS)  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, dk_desc, dk_2_desc, work, order, queue, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD,
                        True)),
            (_consume, (1, dv_desc, dv_2_desc, work, order, queue, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD,
                        True)),
            (_sum_queries, (sums, ring, order, ranges, queue, turns, GROUP, D_2, ALIGNMENT)),
            (produce, (loads, buffers, rest_bufs, barriers, order, ranges, queue, counter_ptr, n_items, GROUP,
                       ALIGNMENT, True)),
            (await_turns, (turns, ds_empty, semaphore_ptr, order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)),
            (pass_turns, (turns, semaphore_ptr, order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)),
        ], [4, 4, 1, 1, 1], REGISTERS)  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, spoiled: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dk, dv, dense; adds dS K to the prepared dq_sum, in one order where there are semaphores.

    For a call that has `tiles_of`, and rows that descriptors.loadable takes. spoiled (nan_isolation.new_marks) gets
    the marks of NaN in dk and dv.
    """
    rows, _, dq_sum, semaphores = prepared
    assert dq_sum is not None
    n_heads, head_dim = q.shape[1:]
    total_k, n_kv_heads, _ = k.shape
    ordered = semaphores is not None
    tiles = tiles_of(head_dim, q.dtype, features.softcap, ordered)
    assert tiles is not None
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    n_tiles = ceil_div(total_k, BLOCK_N)
    d_2 = split_columns(head_dim)[1]
    descs, rest = columns_of_heads(
        (q, tiles.block_m), (k, BLOCK_N), (v, BLOCK_N), (do, tiles.block_m), (dk, BLOCK_N), (dv, BLOCK_N)
    )
    sums, sums_2 = rows_of_heads(dq_sum, 2 * SUM_BLOCK), rows_of_heads(dq_sum, 2 * d_2) if d_2 else None
    n_items = n_tiles * n_kv_heads
    programs, counter = programs_of(n_items, q.device, tiles.dynamic)
    key_tiles = None if ordered else schedule.key_tiles
    section = n_kv_heads
    if not ordered:
        section = kv_heads_per_section(q, n_kv_heads, n_tiles, multiprocessors(q.device))
    launch(
        _bwd_kernel, (programs,),
        *descs[:4], elements(rows, tiles.block_m), *descs[4:], sums, *rest, sums_2,
        counter, key_tiles, semaphores, schedule.query_start, schedule.query_end, spoiled, features.softmax_scale,
        features.softcap, n_items, n_tiles, n_kv_heads, section, total_k, rows.shape[-1],
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // n_kv_heads, D_2=d_2, ALIGNMENT=SUM_BLOCK,
        STAGES=tiles.stages, DS_STAGES=tiles.ds_stages, HALVES=tiles.halves, AHEAD=tiles.ahead,
        REGISTERS=ORDERED_REGISTERS if ordered else GROUP_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return dk, dv
