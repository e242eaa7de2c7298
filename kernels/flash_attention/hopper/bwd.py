"""The backward pass in one kernel of five matmuls, for Hopper: TMA, two warpgroups, dQ summed in memory.

One producer warp loads Q, dO, lse and delta through TMA; two warpgroups hold half of a tile of keys each. S and dP are
computed transposed, [keys, queries], so that P^T and dS^T feed dV and dK from registers. dS^T goes through shared
memory for dQ = dS K, which is added to fp32 in global memory: the order of those additions varies from run to run.
A head_dim of 96 is worked as 64 columns and 32, each with buffers, descriptors and accumulators of its own, because
Triton's blocks are powers of two: padded to 128 it would pay for a third more of every product.
Where there are several documents, NaN of one that came into another through a tile of both is repaired (marks.py).
At head_dim 64 and 128, but for softcap in fp16 at 128, a kernel takes its place in which a third warpgroup does dQ
(bwd_three_groups.py). Where gradients must be repeatable, the kernel gives dK and dV alone, which have one owner each,
and another kernel dQ (bwd_queries.py): seven matmuls, as at head_dim 256, where two kernels always do all this
(bwd_wide.py).
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
from kernels.flash_attention.hopper import bwd_three_groups, bwd_wide
from kernels.flash_attention.hopper.bwd_dq import ROW_ALIGNMENT, finish, prepare, prepare_rows
from kernels.flash_attention.hopper.bwd_queries import gradient_of_queries
from kernels.flash_attention.hopper.bwd_steps import (
    BLOCK_N,
    SIZES,
    SUM_BLOCK,
    decode,
    kv_heads_per_section,
    new_barriers,
    new_buffers,
    next_step,
    produce,
    seen_by,
)
from kernels.flash_attention.hopper.bwd_tma import named_barrier, tma_reduce_add
from kernels.flash_attention.hopper.columns import keep_columns
from kernels.flash_attention.hopper.descriptors import is_hopper, loadable, numbers, rows_of_heads
from kernels.flash_attention.hopper.marks import mark_spoiled
from kernels.flash_attention.portable.bwd import repair_dk_dv, repair_dq
from kernels.flash_attention.portable.launch import ceil_div, new_marks
from kernels.flash_attention.portable.load import split_width
from kernels.flash_attention.replay import launch
from kernels.flash_attention.schedule import Schedule
from kernels.flash_attention.scores import cap

# 3 x 128 threads: the producer's warpgroup gives registers up, and the consumers take them
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, 240, 24


@dataclass(frozen=True)
class BackwardTiles:
    """block_m queries a step; stages of Q and of dO in flight."""

    block_m: int
    stages: int


HEAD_DIMS = (64, 96, 128, bwd_wide.HEAD_DIM)
# by head_dim; 152 and 192 KiB of shared memory
TILES = {96: BackwardTiles(64, 2), 128: BackwardTiles(64, 2)}
# for dK and dV alone: what dQ leaves of shared memory is for more stages, of which three would take a division and
# spills; 164, 147 and 194 KiB
TILES_WITHOUT_DQ = {64: BackwardTiles(128, 4), 96: BackwardTiles(64, 4), 128: BackwardTiles(64, 4)}
# with softcap, whose factor of dS leaves no registers for 128 queries (16k: 4.5 ms for 8.8)
CAPPED_TILES_WITHOUT_DQ = TILES_WITHOUT_DQ | {64: BackwardTiles(64, 4)}


def tiles_of(head_dim: int, with_dq: bool, softcap: float) -> BackwardTiles:
    """What `gradients_of_keys` takes."""
    if with_dq:
        return TILES[head_dim]
    return (CAPPED_TILES_WITHOUT_DQ if softcap else TILES_WITHOUT_DQ)[head_dim]


@gluon.jit
def _consumer(
    HALF: gl.constexpr, dk_desc, dv_desc, sum_desc, rest, buffers, rest_bufs, ds_bufs, sum_bufs, barriers, order,
    ranges, spoiled_ptr, softmax_scale, softcap,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, ALIGNMENT: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of half the tile's keys, and WITH_DQ half of each step's dQ."""
    q_bufs, do_bufs, lse_bufs, delta_bufs, k_buf, v_buf = buffers
    kv_full, q_full, do_full, empty = barriers
    STAGES: gl.constexpr = q_bufs.shape[0]
    BLOCK_M: gl.constexpr = q_bufs.shape[1]
    D_1: gl.constexpr = q_bufs.shape[2]
    BLOCK_N: gl.constexpr = k_buf.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    # matmuls of which one operation of a head is made
    PARTS: gl.constexpr = 2 if D_2 else 1
    # dQ of a step is [64, D], halved by columns: at 96 the parts of 64 and 32 are the halves
    DQ_COLUMNS: gl.constexpr = D_2 if D_2 and HALF == 1 else 64
    dtype: gl.constexpr = q_bufs.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_1, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout, k_width=2)
    queries_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    keys_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)

    first, kv_head, m, end, n_steps = decode(order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
    start, head = m, kv_head * GROUP
    first_here = first + HALF * KEYS
    query_start, query_end, whole_start, whole_end = seen_by(ranges, first_here, KEYS, keys_layout)
    k_half = k_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D_1]
    v_half = v_buf.slice(HALF * KEYS, KEYS, dim=0)
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=scores_layout)
    if WITH_DQ:
        sum_buf = sum_bufs[HALF]
        no_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, layout=dq_layout)
    dk = gl.zeros([KEYS, D_1], gl.float32, layout=kv_layout)
    dv = gl.zeros([KEYS, D_1], gl.float32, layout=kv_layout)
    if D_2:
        q_2_bufs, do_2_bufs, k_2_buf, v_2_buf = rest_bufs
        k_half_2 = k_2_buf.slice(HALF * KEYS, KEYS, dim=0)  # [64, D_2]
        v_half_2 = v_2_buf.slice(HALF * KEYS, KEYS, dim=0)
        kv_layout_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_2, 16])
        operand_layout_2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_layout_2, k_width=2)
        dk_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
        dv_2 = gl.zeros([KEYS, D_2], gl.float32, layout=kv_layout_2)
    mbarrier.wait(kv_full, 0)
    for step in range(n_steps):
        stage, phase = step % STAGES, (step // STAGES) & 1
        q, do = q_bufs.index(stage), do_bufs.index(stage)  # [M, D_1]
        mbarrier.wait(q_full.index(stage), phase)
        scores = warpgroup_mma(k_half, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)  # [64, M]
        if D_2:
            q_2, do_2 = q_2_bufs.index(stage), do_2_bufs.index(stage)  # [M, D_2]
            scores = warpgroup_mma(k_half_2, q_2.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v_half, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if D_2:
            dp = warpgroup_mma(v_half_2, do_2.permute((1, 0)), dp, is_async=True)
        scores = warpgroup_mma_wait(PARTS, deps=[scores])
        lse = gl.expand_dims(lse_bufs.index(stage).load(queries_layout), 0)
        if HAS_SOFTCAP:
            scores, t = cap(scores, softmax_scale, softcap, dtype)
            p = gl.exp2(scores - lse)
        else:
            p = gl.exp2(scores * (softmax_scale * 1.4426950408889634) - lse)
        if (m < whole_start) | (m + BLOCK_M > whole_end):
            p = keep_columns(p, query_start - m, query_end - m, 0.0)
        p_low = p.to(dtype)
        if HAS_SOFTCAP:
            p = p * (1.0 - t * t)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(gl.convert_layout(p_low, operand_layout), do, dv, is_async=True)
        if D_2:
            dv_2 = warpgroup_mma(gl.convert_layout(p_low, operand_layout_2), do_2, dv_2, is_async=True)
        delta = gl.expand_dims(delta_bufs.index(stage).load(queries_layout), 0)
        ds = (p * (dp - delta)).to(dtype)
        if WITH_DQ:
            ds_buf = ds_bufs.index(step % 2)  # [N, M], of both warpgroups
            ds_buf.slice(HALF * KEYS, KEYS, dim=0).store(ds)
            fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout), q, dk, is_async=True)
        if D_2:
            dk_2 = warpgroup_mma(gl.convert_layout(ds, operand_layout_2), q_2, dk_2, is_async=True)
        if WITH_DQ:
            named_barrier(10, 256)  # both halves of dS^T are in shared memory
            ds_rows = ds_buf.permute((1, 0))
            if D_2:
                k_columns = k_buf if HALF == 0 else k_2_buf
                column = head * (D_1 + D_2)
            else:
                k_columns = k_buf.slice(HALF * 64, 64, dim=1)
                column = head * D_1 + HALF * 64
            dq = warpgroup_mma(ds_rows, k_columns, no_dq, use_acc=False, is_async=True)  # [64, DQ_COLUMNS]
        if D_2:
            dv, dv_2, dk, dk_2 = warpgroup_mma_wait(1 if WITH_DQ else 0, deps=[dv, dv_2, dk, dk_2])
        else:
            dv, dk = warpgroup_mma_wait(1 if WITH_DQ else 0, deps=[dv, dk])
        mbarrier.arrive(empty.index(stage), count=1)
        if WITH_DQ:
            dq = warpgroup_mma_wait(0, deps=[dq])
            tma.store_wait(0)  # the last sum has left its buffer
            sum_buf.store(dq)
            fence_async_shared()
            tma_reduce_add(sum_desc, [m, column], sum_buf)
        m, head = next_step(m, head, start, end, GROUP, BLOCK_M)
    if spoiled_ptr is not None:
        mark_spoiled(dk + dv, first_here, kv_head, ranges[2], spoiled_ptr)
        if D_2:
            mark_spoiled(dk_2 + dv_2, first_here, kv_head, ranges[2], spoiled_ptr)
    # dK and dV leave through the buffers of K and V
    named_barrier(10, 256)  # both warpgroups have read K for the last time
    k_half.store((dk * softmax_scale).to(dtype))
    v_half.store(dv.to(dtype))
    if D_2:
        k_half_2.store((dk_2 * softmax_scale).to(dtype))
        v_half_2.store(dv_2.to(dtype))
    fence_async_shared()
    named_barrier(10, 256)
    column = kv_head * (D_1 + D_2)
    if HALF == 0:
        tma.async_copy_shared_to_global(dk_desc, [first, column], k_buf)
        if D_2:
            tma.async_copy_shared_to_global(rest[0], [first, column], k_2_buf)
    else:
        tma.async_copy_shared_to_global(dv_desc, [first, column], v_buf)
        if D_2:
            tma.async_copy_shared_to_global(rest[1], [first, column], v_2_buf)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, sum_desc,
    q_2_desc, k_2_desc, v_2_desc, do_2_desc, dk_2_desc, dv_2_desc, sum_2_desc,
    tiles_ptr, query_start_ptr, query_end_ptr, spoiled_ptr, softmax_scale, softcap, n_tiles, n_kv_heads, section,
    total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, D_2: gl.constexpr, STAGES: gl.constexpr,
    ALIGNMENT: gl.constexpr, WITH_DQ: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one KV head, over all query heads that share it.

    Descriptors of the first D_1 columns of each head, and with a 2 of the D_2 after them (None where D_2 is 0).
    WITH_DQ adds to what sum_desc and sum_2_desc describe; they are None without it.
    spoiled is None, or where to mark NaN in dK and dV (marks.py).
    """
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    buffers = new_buffers(q_desc, k_desc, v_desc, do_desc, rows_desc, STAGES)
    barriers = new_barriers(STAGES, 2)
    ds_bufs, sum_bufs, sum_descs, rest_bufs = None, None, (None, None), None
    if WITH_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        # two, so that a warpgroup writes a step's dS^T while the other still reads the last one's
        ds_bufs = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
        if D_2:
            sum_0 = gl.allocate_shared_memory(gl.float32, [64, 64], sum_desc.layout)
            sum_1 = gl.allocate_shared_memory(gl.float32, [64, D_2], sum_2_desc.layout)
            sum_bufs = (sum_0, sum_1)
            sum_descs = (sum_desc, sum_2_desc)
        else:
            both = gl.allocate_shared_memory(gl.float32, [2, 64, 64], sum_desc.layout)
            sum_bufs = (both.index(0), both.index(1))
            sum_descs = (sum_desc, sum_desc)
    if D_2:
        q_2_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_2], q_2_desc.layout)
        do_2_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_2], do_2_desc.layout)
        k_2_buf = gl.allocate_shared_memory(dtype, [BLOCK_N, D_2], k_2_desc.layout)
        v_2_buf = gl.allocate_shared_memory(dtype, [BLOCK_N, D_2], v_2_desc.layout)
        rest_bufs = (q_2_bufs, do_2_bufs, k_2_buf, v_2_buf)
    order = (tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = (query_start_ptr, query_end_ptr, total_k)
    loads = (
        (q_desc, k_desc, v_desc, do_desc), (q_2_desc, k_2_desc, v_2_desc, do_2_desc), rows_desc,
        (stride_qh, stride_kh, stride_vh, stride_doh), padded_q, n_kv_heads * GROUP * padded_q,
    )  # fmt: skip
    rest = (dk_2_desc, dv_2_desc)
    gl.warp_specialize([
        (_consumer, (0, dk_desc, dv_desc, sum_descs[0], rest, buffers, rest_bufs, ds_bufs, sum_bufs, barriers, order,
                     ranges, spoiled_ptr, softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, WITH_DQ)),
        (_consumer, (1, dk_desc, dv_desc, sum_descs[1], rest, buffers, rest_bufs, ds_bufs, sum_bufs, barriers, order,
                     ranges, spoiled_ptr, softmax_scale, softcap, HAS_SOFTCAP, GROUP, D_2, ALIGNMENT, WITH_DQ)),
        (produce, (loads, buffers, rest_bufs, barriers, order, ranges, GROUP, ALIGNMENT)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def supports(q: Tensor, k: Tensor, v: Tensor, features: Features) -> bool:
    """Whether attention_backward here can take a call: sm_90, 2-byte floats, head_dim 64, 96, 128 or 256, no ALiBi."""
    return (
        q.is_cuda
        and is_hopper(q.device)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] in HEAD_DIMS
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and not features.alibi
        and loadable(q)
        and loadable(k)
        and loadable(v)
    )


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, dq_sum: Tensor | None, spoiled: Tensor | None,
    schedule: Schedule, features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> dk, dv, dense; adds dS K to dq_sum, fp32 (total_q, n_heads * head_dim), unless it is None.

    rows as `prepare` or `prepare_rows` returns them; spoiled (portable.launch.new_marks) gets the marks of NaN in dk
    and dv.
    """
    n_heads, head_dim = q.shape[1:]
    total_k, n_kv_heads, _ = k.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tiles = tiles_of(head_dim, dq_sum is not None, features.softcap)
    rows_desc = numbers(rows, tiles.block_m)
    n_tiles = ceil_div(total_k, BLOCK_N)
    d_1, d_2 = split_width(head_dim)
    operands = [
        (q, tiles.block_m), (k, BLOCK_N), (v, BLOCK_N), (do, tiles.block_m), (dk, BLOCK_N), (dv, BLOCK_N),
    ]  # fmt: skip
    if dq_sum is not None:
        operands.append((dq_sum.view(q.shape[0], -1, head_dim if d_2 else SUM_BLOCK), SUM_BLOCK))
    # views of columns cost the host time, so only where there are two parts
    parts = [[x[..., :d_1], x[..., d_1:]] if d_2 else [x] for x, _ in operands]
    blocks = [block for _, block in operands]
    descs = [rows_of_heads(x[0], block) for x, block in zip(parts, blocks, strict=True)]
    rest = [rows_of_heads(x[1], block) if d_2 else None for x, block in zip(parts, blocks, strict=True)]
    sums = [] if dq_sum is not None else [None]  # in the place of the sum's descriptor
    launch(
        _bwd_kernel, (n_tiles * n_kv_heads,),
        *descs[:4], rows_desc, *descs[4:], *sums, *rest, *sums,
        schedule.key_tiles, schedule.query_start, schedule.query_end, spoiled, features.softmax_scale, features.softcap,
        n_tiles, n_kv_heads, kv_heads_per_section(q, n_kv_heads), total_k, rows.shape[-1],
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        HAS_SOFTCAP=features.softcap != 0.0, GROUP=n_heads // n_kv_heads, D_2=d_2, STAGES=tiles.stages,
        ALIGNMENT=ROW_ALIGNMENT, WITH_DQ=dq_sum is not None,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return dk, dv


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, schedule: Schedule, features: Features,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """do like o, lse and delta (n_heads, total_q) fp32 -> dq, dk, dv, dense, in the dtype of q, k, v.

    For calls that `supports` takes. Unless deterministic, below head_dim 256 the addends of dq come in any order.
    """
    if not loadable(do):
        do = do.clone(memory_format=torch.contiguous_format)
    spoiled_q = spoiled_k = None
    if schedule.several_documents:
        spoiled_q, spoiled_k = (new_marks(x.shape[1], x.shape[0], x.device) for x in (q, k))
    head_dim = q.shape[-1]
    if head_dim == bwd_wide.HEAD_DIM:
        section = kv_heads_per_section(q, k.shape[1])
        dk, dv = bwd_wide.gradients_of_keys(do, q, k, v, lse, delta, spoiled_k, schedule, features, section)
        dq = gradient_of_queries(do, q, k, v, lse, delta, spoiled_q, schedule, features)
    elif deterministic:
        rows = prepare_rows(lse, delta)
        dk, dv = gradients_of_keys(do, q, k, v, rows, None, spoiled_k, schedule, features)
        dq = gradient_of_queries(do, q, k, v, lse, delta, spoiled_q, schedule, features)
    else:
        here = bwd_three_groups.tiles_of(head_dim, q.dtype, features.softcap) is None
        dkdv = gradients_of_keys if here else bwd_three_groups.gradients_of_keys
        rows, dq_sum = prepare(lse, delta, head_dim)
        dk, dv = dkdv(do, q, k, v, rows, dq_sum, spoiled_k, schedule, features)
        dq = finish(dq_sum, features.softmax_scale, spoiled_q, q)
    if spoiled_q is not None and spoiled_k is not None:
        repair_dk_dv(do, q, k, v, lse, delta, dk, dv, spoiled_k, schedule, features)
        repair_dq(do, q, k, v, lse, delta, dq, spoiled_q, schedule, features)
    return dq, dk, dv
