"""dK and dV alone, for Hopper: TMA, two warpgroups, and no addition in memory, so every run gives the same bits.

One producer warp loads Q, dO, lse and delta through TMA; two warpgroups hold half of a tile of keys each. S and dP are
computed transposed, [keys, queries], so that P^T and dS^T feed dV and dK from registers.
A head_dim of 96 is worked as 64 columns and 32, each with buffers, descriptors and accumulators of its own, because
Triton's blocks are powers of two: padded to 128 it would pay for a third more of every product.
A program works one item, 128 keys of a KV head, or, if its tiles are dynamic, takes items from a queue, as in
bwd_three_groups.py.

HALVES and AHEAD are that kernel's too: dS of products in 16 bits, and S of the next step computed beside dS. dK and dV
of 16k, causal, bf16, an H200 (run 33 of scripts/results/hopper_kernels_h200_202611.md): at 128 HALVES makes room for
AHEAD, both 3.26 ms for 3.70, with a soft cap 3.41 for 3.82, where HALVES alone takes 3.97; at 96 AHEAD takes 3.83 for
3.95, with HALVES 3.86; at 64 HALVES makes room for 128 queries a step under a soft cap, 4.11 for 4.55, and AHEAD, which
needs steps of 64, takes 3 to 14% more than the kernel without.
Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608, section 3.1.
"""

from dataclasses import dataclass

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

from kernels.flash_attention.features import Features
from kernels.flash_attention.hopper.barriers import hand_back, meet
from kernels.flash_attention.hopper.bwd_dq import ROW_ALIGNMENT
from kernels.flash_attention.hopper.bwd_steps import (
    BLOCK_N,
    SIZES,
    decode,
    kv_heads_per_section,
    new_barriers,
    new_buffers,
    new_rest_buffers,
    next_step,
    produce,
    product,
    seen_by,
)
from kernels.flash_attention.hopper.bwd_tma import named_barrier
from kernels.flash_attention.hopper.columns import keep_columns
from kernels.flash_attention.hopper.descriptors import numbers, parts_of_heads
from kernels.flash_attention.hopper.marks import mark_rows
from kernels.flash_attention.hopper.queue import field, five_fields, new_queue, programs_of, read
from kernels.flash_attention.portable.launch import ceil_div
from kernels.flash_attention.portable.load import split_width
from kernels.flash_attention.replay import launch
from kernels.flash_attention.schedule import Schedule
from kernels.flash_attention.scores import cap

# 3 x 128 threads: the producer's warpgroup gives registers up, and the consumers take them
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, 240, 24


@dataclass(frozen=True)
class KeysTiles:
    """block_m queries a step; stages of Q and of dO in flight; HALVES and AHEAD of the kernel.

    dynamic: whether programs take their items from a queue.
    """

    block_m: int
    stages: int
    dynamic: bool
    halves: bool = False
    ahead: bool = False


# by head_dim and dtype; 197, 195 and 194 KiB of shared memory. Three stages would take a division, and spills
TILES = {
    (64, torch.bfloat16): KeysTiles(128, 4, dynamic=True),
    (64, torch.float16): KeysTiles(128, 4, dynamic=True),
    (96, torch.bfloat16): KeysTiles(64, 4, dynamic=True, ahead=True),
    (96, torch.float16): KeysTiles(64, 4, dynamic=True, ahead=True),
    (128, torch.bfloat16): KeysTiles(64, 4, dynamic=False, halves=True, ahead=True),
    (128, torch.float16): KeysTiles(64, 4, dynamic=False),
}
# with softcap, whose factor of dS leaves no registers for 128 queries in fp32 (16k: 4.5 ms for 8.8); then 131 KiB at 64
CAPPED_TILES = TILES | {
    (64, torch.bfloat16): KeysTiles(128, 4, dynamic=True, halves=True),
    (64, torch.float16): KeysTiles(64, 4, dynamic=True),
}


def tiles_of(head_dim: int, dtype: torch.dtype, softcap: float) -> KeysTiles:
    """What `gradients_of_keys` takes."""
    return (CAPPED_TILES if softcap else TILES)[head_dim, dtype]


@gluon.jit
def _consume_item(
    found, turn, done, HALF: gl.constexpr, out_desc, out_2_desc, buffers, rest_bufs, barriers, ranges, spoiled_ptr,
    softmax_scale, softcap, HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr,
    HALVES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of half an item's keys. HALF 0 writes dK, 1 dV.

    found: what `decode` finds of the program's item number `turn`; done: the steps of the items before it. Returns the
    steps done.
    """
    q_bufs, do_bufs, lse_bufs, delta_bufs, k_bufs, v_bufs = buffers
    kv_full, kv_empty, q_full, do_full, empty = barriers
    ITEMS: gl.constexpr = k_bufs.shape[0]
    place = turn % ITEMS
    k_buf, v_buf = k_bufs.index(place), v_bufs.index(place)
    STAGES: gl.constexpr = q_bufs.shape[0]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    D_1: gl.constexpr = q_bufs.shape[2]
    BLOCK_N: gl.constexpr = k_buf.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    # matmuls of which one operation of a head is made
    PARTS: gl.constexpr = 2 if D_2 else 1
    dtype: gl.constexpr = q_bufs.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout, k_width=2)
    queries_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    keys_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)

    first, kv_head, m, end, n_steps = found
    stop = done + n_steps
    start, head = m, kv_head * GROUP
    first_here = first + HALF * KEYS
    query_start, query_end, whole_start, whole_end = seen_by(ranges, first_here, KEYS, keys_layout)
    k_half = k_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D_1]
    v_half = v_buf.slice(HALF * KEYS, KEYS, dim=0)
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=scores_layout)
    dk = gl.zeros([KEYS, D_1], gl.float32, layout=kv_layout)
    dv = gl.zeros([KEYS, D_1], gl.float32, layout=kv_layout)
    if D_2:
        q_2_bufs, do_2_bufs, k_2_bufs, v_2_bufs = rest_bufs
        k_2_buf, v_2_buf = k_2_bufs.index(place), v_2_bufs.index(place)
        k_half_2 = k_2_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D_2]
        v_half_2 = v_2_buf.slice(HALF * KEYS, KEYS, dim=0)
        kv_layout_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2, 16])
        operand_layout_2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout_2, k_width=2)
        dk_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
        dv_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
    mbarrier.wait(kv_full.index(place), (turn // ITEMS) & 1)
    if ITEMS > 1:
        if turn > 0:  # by now dK and dV of the item before have left
            tma.store_wait(0)
            hand_back(kv_empty.index((turn - 1) % ITEMS))
    if AHEAD:  # S of the first step
        stage = done % STAGES
        mbarrier.wait(q_full.index(stage), (done // STAGES) & 1, pred=n_steps > 0)
        scores = warpgroup_mma(k_half, q_bufs.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if D_2:
            scores = warpgroup_mma(k_half_2, q_2_bufs.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    for step in range(done, stop):
        stage, phase = step % STAGES, (step // STAGES) & 1
        q, do = q_bufs.index(stage), do_bufs.index(stage)  # [M, D_1]
        if D_2:
            q_2, do_2 = q_2_bufs.index(stage), do_2_bufs.index(stage)  # [M, D_2]
        if not AHEAD:
            mbarrier.wait(q_full.index(stage), phase)
            scores = warpgroup_mma(k_half, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [64, M]
            if D_2:
                scores = warpgroup_mma(k_half_2, q_2.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v_half, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if D_2:
            dp = warpgroup_mma(v_half_2, do_2.permute((1, 0)), dp, is_async=True)
        if not AHEAD:
            scores = warpgroup_mma_wait(PARTS, deps=[scores])
        lse = gl.expand_dims(lse_bufs.index(stage).load(queries_layout), 0)
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            slope = 1.0 - t * t
            if HALVES:
                slope = slope.to(dtype)
            p = gl.exp2(scores - lse)
        else:
            p = gl.exp2(scores * (softmax_scale * 1.4426950408889634) - lse)
        if (m < whole_start) | (m + BLOCK_M > whole_end):
            p = keep_columns(p, query_start - m, query_end - m, 0.0)
        p_low = p.to(dtype)
        if HAS_SOFTCAP and HALVES:
            p_sloped = product(p_low, slope)
        elif HAS_SOFTCAP:
            p = p * slope
        if AHEAD:  # S of the next step; past the last one of whatever the buffer holds, and nobody reads it
            following = step + 1
            next_stage = following % STAGES
            mbarrier.wait(q_full.index(next_stage), (following // STAGES) & 1, pred=following < stop)
            q_next = q_bufs.index(next_stage)
            scores = warpgroup_mma(k_half, q_next.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if D_2:
                scores = warpgroup_mma(k_half_2, q_2_bufs.index(next_stage).permute((1, 0)), scores, is_async=True)
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(gl.convert_layout(p_low, operand_layout), do, dv, is_async=True)
        if D_2:
            dv_2 = warpgroup_mma(gl.convert_layout(p_low, operand_layout_2), do_2, dv_2, is_async=True)
        if AHEAD:
            dp = warpgroup_mma_wait(2 * PARTS, deps=[dp])  # S of the next step and dV go on
        delta = gl.expand_dims(delta_bufs.index(stage).load(queries_layout), 0)
        if HALVES:
            ds = product(p_sloped if HAS_SOFTCAP else p_low, (dp - delta).to(dtype))
        else:
            ds = (p * (dp - delta)).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout), q, dk, is_async=True)
        if D_2:
            dk_2 = warpgroup_mma(gl.convert_layout(ds, operand_layout_2), q_2, dk_2, is_async=True)
            dv, dv_2, dk, dk_2 = warpgroup_mma_wait(0, deps=[dv, dv_2, dk, dk_2])
        else:
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=[scores])
        hand_back(empty.index(stage))
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M)
    if spoiled_ptr is not None:
        sums_2 = dk_2 + dv_2 if D_2 else None
        mark_rows(dk + dv, sums_2, first_here, kv_head, ranges[2], spoiled_ptr, HALF)
    # dK and dV leave through the buffers of K and V, of which each warpgroup read its own half: when all its warps have
    meet()
    k_half.store((dk * softmax_scale).to(dtype))
    v_half.store(dv.to(dtype))
    if D_2:
        k_half_2.store((dk_2 * softmax_scale).to(dtype))
        v_half_2.store(dv_2.to(dtype))
    fence_async_shared()
    named_barrier(10, 256)
    column = kv_head * (D_1 + D_2)
    tma.async_copy_shared_to_global(out_desc, [first, column], k_buf if HALF == 0 else v_buf)
    if D_2:
        tma.async_copy_shared_to_global(out_2_desc, [first, column], k_2_buf if HALF == 0 else v_2_buf)
    return stop


@gluon.jit
def _consume(
    HALF: gl.constexpr, out_desc, out_2_desc, buffers, rest_bufs, barriers, order, ranges, queue, spoiled_ptr,
    softmax_scale, softcap, HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, ALIGNMENT: gl.constexpr,
    HALVES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """`_consume_item` of the program's item, or of every item of the queue if there is one."""
    BLOCK_M: gl.constexpr = buffers[0].shape[1]
    BLOCK_N: gl.constexpr = buffers[4].shape[1]
    if queue is None:
        found = decode(gl.program_id(0), order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _consume_item(found, 0, 0, HALF, out_desc, out_2_desc, buffers, rest_bufs, barriers, ranges, spoiled_ptr,
                      softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, HALVES, AHEAD)  # fmt: skip
    else:
        turn, done = 0, 0
        item = read(queue, turn)
        while field(item, 0) >= 0:
            found = five_fields(item)
            done = _consume_item(
                found, turn, done, HALF, out_desc, out_2_desc, buffers, rest_bufs, barriers, ranges, spoiled_ptr,
                softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, HALVES, AHEAD,
            )  # fmt: skip
            turn += 1
            item = read(queue, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc,
    q_2_desc, k_2_desc, v_2_desc, do_2_desc, dk_2_desc, dv_2_desc,
    counter_ptr, tiles_ptr, query_start_ptr, query_end_ptr, spoiled_ptr, softmax_scale, softcap,
    n_items, n_tiles, n_kv_heads, section, total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, AHEAD: gl.constexpr, ALIGNMENT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """An item: 128 keys of one KV head, over all query heads that share it.

    Program i works item i, and then others if there is a counter of them.
    Descriptors of the first D_1 columns of each head, and with a 2 of the D_2 after them (None where D_2 is 0).
    spoiled_ptr is None, or where to mark NaN in dK and dV (marks.py).
    """
    ITEMS: gl.constexpr = 1 if counter_ptr is None else 2
    buffers = new_buffers(q_desc, k_desc, v_desc, do_desc, rows_desc, STAGES, ITEMS)
    barriers = new_barriers(STAGES, ITEMS)
    rest_bufs, queue = None, None
    if counter_ptr is not None:
        queue = new_queue(2)
    if D_2:
        rest_bufs = new_rest_buffers(q_2_desc, k_2_desc, v_2_desc, do_2_desc, STAGES, ITEMS)
    order = (tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = (query_start_ptr, query_end_ptr, total_k)
    loads = (
        (q_desc, k_desc, v_desc, do_desc), (q_2_desc, k_2_desc, v_2_desc, do_2_desc), rows_desc,
        (stride_qh, stride_kh, stride_vh, stride_doh), padded_q, n_kv_heads * GROUP * padded_q,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (0, dk_desc, dk_2_desc, buffers, rest_bufs, barriers, order, ranges, queue, spoiled_ptr,
                     softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD)),
        (_consume, (1, dv_desc, dv_2_desc, buffers, rest_bufs, barriers, order, ranges, queue, spoiled_ptr,
                     softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, HALVES, AHEAD)),
        (produce, (loads, buffers, rest_bufs, barriers, order, ranges, queue, counter_ptr, n_items, GROUP, ALIGNMENT)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, spoiled: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dk, dv, dense.

    rows as `prepare_rows` returns them; spoiled (portable.launch.new_marks) gets the marks of NaN in dk and dv.
    """
    n_heads, head_dim = q.shape[1:]
    total_k, n_kv_heads, _ = k.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tiles = tiles_of(head_dim, q.dtype, features.softcap)
    rows_desc = numbers(rows, tiles.block_m)
    n_tiles = ceil_div(total_k, BLOCK_N)
    descs, rest = parts_of_heads(
        (q, tiles.block_m), (k, BLOCK_N), (v, BLOCK_N), (do, tiles.block_m), (dk, BLOCK_N), (dv, BLOCK_N)
    )
    n_items = n_tiles * n_kv_heads
    programs, counter = programs_of(n_items, q.device, tiles.dynamic)
    launch(
        _dkdv_kernel, (programs,),
        *descs[:4], rows_desc, *descs[4:], *rest, counter,
        schedule.key_tiles, schedule.query_start, schedule.query_end, spoiled, features.softmax_scale, features.softcap,
        n_items, n_tiles, n_kv_heads, kv_heads_per_section(q, n_kv_heads), total_k, rows.shape[-1],
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // n_kv_heads, D_2=split_width(head_dim)[1],
        STAGES=tiles.stages, HALVES=tiles.halves, AHEAD=tiles.ahead, ALIGNMENT=ROW_ALIGNMENT,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return dk, dv
