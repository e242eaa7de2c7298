"""The fused backward kernel for Hopper. One kernel computes dQ, dK and dV, with five matmuls per step.

A work item is 128 keys of one KV head. Each step of a work item processes one block of queries of one query head. Each
of two consumer warpgroups computes S^T = K Q^T, P^T, dP^T = V dO^T and dS^T for 64 of the item's keys. The consumers
add P^T dO to dV and dS^T Q to dK, with P^T and dS^T in registers. The consumers also write dS^T to a ring buffer in
shared memory (ring.py). The dQ warpgroup reads dS from this ring buffer, and computes dQ = dS K for all 128 keys, in
tiles of at most 64 x 64. TMA adds each dQ tile to an fp32 sum in global memory (dq_sum.py). The order in which dQ tiles
are added varies, unless dq_order.py fixes the order. The producer warp loads K, V, Q, dO, lse and delta by TMA.

The kernel cannot deadlock. Steps are numbered over all items of a program. dS of step j is computed after Q and dO of
step j have arrived, and after dQ of step `j - DS_STAGES`. With the option `ahead`, Q of step j + 1 must also have
arrived before dS of step j is computed. dQ of step j is computed after dS of step j. A dQ tile is written to shared
memory after TMA has read the previous tile from the same buffer. The loads of step j start after the consumers have
finished step `j - STAGES`. The loads of K and V of item i start after TMA has read dK and dV of item i - 2 from the
same buffers. `STAGES` is at least 2, so Q of step j + 1 can be loaded before step j is finished. The first unfinished
step therefore never waits for another unfinished step.

A thread has 208 registers in consumers, 72 in the dQ warpgroup and 24 in the producer. ptxas puts accumulators at R24
and above, and leaves the last two registers unused, so a thread needs 26 registers in addition to its accumulators. At
head_dim 128, the accumulators dK, dV, S and dP together take 192 registers, so a thread of a consumer would need 218
registers. If accumulators do not fit, ptxas serialises all matmuls (warning C7512). The matmul dP therefore starts only
after P has replaced S. A dQ tile takes 32 registers, so a thread of the dQ warpgroup needs at least 58 registers.

Source: arXiv:2307.08691, Alg. 2; arXiv:2407.08608.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import ceil_div, multiprocessors
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.dq_order import new_order_barriers, raise_semaphores, wait_for_order
from fa_kernels.flash_attention.hopper.backward.dq_sum import Prepared
from fa_kernels.flash_attention.hopper.backward.fused_config import config_of
from fa_kernels.flash_attention.hopper.backward.fused_consumer import Work, consume
from fa_kernels.flash_attention.hopper.backward.fused_dq import TILES_IN_FLIGHT, DqSum, add_dq
from fa_kernels.flash_attention.hopper.backward.items import (
    BLOCK_N,
    SIZES,
    SUM_BLOCK,
    Descriptors,
    Inputs,
    new_buffers,
    new_item_barriers,
    produce,
    with_all_columns,
)
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP
from fa_kernels.flash_attention.hopper.primitives.columns import column_blocks, new_buffer
from fa_kernels.flash_attention.hopper.primitives.queue import new_queue, programs_of
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, new_barriers
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale, TileOrder
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.tile_order import fewest_kv_heads, kv_heads_per_section
from fa_kernels.launch.descriptors import columns_of_heads, elements, rows_of_heads
from fa_kernels.launch.record import launch

# All warps start with `START_REGISTERS` registers per thread. The second consumer, the dQ warpgroup and the producer
# then change to `WORKER_REGISTERS`. The first consumer gets the rest of the multiprocessor's registers.
START_REGISTERS = 128
WORKER_REGISTERS = (208, 72, 24)
ORDERED_REGISTERS = (*WORKER_REGISTERS, 24, 24)  # dq_order.py adds two warps with 24 registers per thread


@gluon.constexpr_function
def _arrivals(config):
    """Returns how many threads of each consumer arrive at an mbarrier when the consumer's half of dS is written."""
    return WARPGROUP.value if config.each_hands_over else 1


@gluon.jit(do_not_specialize=SIZES)
def _bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_delta_desc, dk_desc, dv_desc, sum_desc,
    q_2_desc, k_2_desc, v_2_desc, do_2_desc, dk_2_desc, dv_2_desc, sum_2_desc,
    counter_ptr, tiles_ptr, semaphore_ptr, query_start_ptr, query_end_ptr, marks_ptr, softmax_scale, softcap,
    n_items, n_tiles, n_kv_heads, section, total_k, padded_q, stride_qh, stride_kh, stride_vh, stride_doh,
    CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr, GROUP: gl.constexpr, ALIGNMENT: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV of work items, and adds each item's part of dQ to the sum of dQ.

    An item is 128 keys of one KV head, with all query heads that share this KV head.

    Program i processes work item i first.
    counter_ptr: the counter of the queue of items (queue.py), or None. tiles_ptr: the order in which tiles of keys are
    processed, or None for ascending order. semaphore_ptr: the semaphores of the dQ order (dq_order.py), or None. If
    semaphores are given, tiles_ptr must be None. marks_ptr: the pointer to the NaN marks of dK and dV (nan_marks.py),
    or None. padded_q: the number of lse values per head, with padding. q_desc, k_desc and so on describe the first
    column block of each head. q_2_desc, k_2_desc and so on describe the second column block, and are None if heads have
    only one column block.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    STAGES: gl.constexpr = CONFIG.stages
    DS_STAGES: gl.constexpr = CONFIG.ds_stages
    ITEMS: gl.constexpr = 1 if counter_ptr is None else 2
    descs = Descriptors(
        column_blocks(q_desc, q_2_desc), column_blocks(k_desc, k_2_desc), column_blocks(v_desc, v_2_desc),
        column_blocks(do_desc, do_2_desc), lse_delta_desc,
    )  # fmt: skip
    dk_descs, dv_descs = column_blocks(dk_desc, dk_2_desc), column_blocks(dv_desc, dv_2_desc)
    buffers = new_buffers(descs, STAGES, ITEMS)
    barriers = new_item_barriers(STAGES, ITEMS)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds_bufs = gl.allocate_shared_memory(q_desc.dtype, [DS_STAGES, BLOCK_N, BLOCK_M], ds_layout)
    # Two buffers hold the dQ tiles in flight. If a head has two column blocks, each column block has one dQ buffer.
    sums = (DqSum(sum_desc, new_buffer(sum_desc, TILES_IN_FLIGHT if sum_2_desc is None else 1)),)
    queue, dq_order = None, None
    if counter_ptr is not None:
        queue = new_queue(3)
    buffers = with_all_columns(buffers, descs)
    if sum_2_desc is not None:
        sum_2_buf = gl.allocate_shared_memory(gl.float32, sum_2_desc.block_type.shape, sum_2_desc.layout)
        sums += (DqSum(sum_2_desc, sum_2_buf),)
    ds = Ring(ds_bufs, new_barriers(DS_STAGES), new_barriers(DS_STAGES))
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(ds.full.index(stage), count=2 * _arrivals(CONFIG))
        mbarrier.init(ds.empty.index(stage), count=WARPGROUP)
    if semaphore_ptr is not None:
        dq_order = new_order_barriers(DS_STAGES)
    tile_order = TileOrder(tiles_ptr, n_tiles, n_kv_heads, section)
    ranges = Ranges(query_start_ptr, query_end_ptr, total_k)
    work = Work(buffers, barriers, ds, ranges, marks_ptr, Scale(softmax_scale, softcap))
    delta_start = n_kv_heads * GROUP * padded_q
    inputs = Inputs(descs, stride_qh, stride_kh, stride_vh, stride_doh, padded_q)
    k_bufs, kv_full = buffers.k, barriers.kv_full
    # Both branches list all roles, because a Triton variable cannot hold a list that mixes functions and constants.
    if semaphore_ptr is None:
        gl.warp_specialize([
            (consume, (0, dk_descs, work, tile_order, queue, CONFIG, HAS_SOFTCAP, GROUP, ALIGNMENT, False)),
            (consume, (1, dv_descs, work, tile_order, queue, CONFIG, HAS_SOFTCAP, GROUP, ALIGNMENT, False)),
            (add_dq, (sums, ds, k_bufs, kv_full, tile_order, ranges, queue, dq_order, GROUP, ALIGNMENT)),
            (produce, (inputs, delta_start, buffers, barriers, tile_order, ranges, queue, counter_ptr, n_items, GROUP,
                       ALIGNMENT)),
        ], [4, 4, 1], WORKER_REGISTERS)  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, dk_descs, work, tile_order, queue, CONFIG, HAS_SOFTCAP, GROUP, ALIGNMENT, True)),
            (consume, (1, dv_descs, work, tile_order, queue, CONFIG, HAS_SOFTCAP, GROUP, ALIGNMENT, True)),
            (add_dq, (sums, ds, k_bufs, kv_full, tile_order, ranges, queue, dq_order, GROUP, ALIGNMENT)),
            (produce, (inputs, delta_start, buffers, barriers, tile_order, ranges, queue, counter_ptr, n_items, GROUP,
                       ALIGNMENT, True)),
            (wait_for_order, (dq_order, ds.empty, semaphore_ptr, tile_order, ranges, GROUP, BLOCK_M, BLOCK_N,
                              ALIGNMENT)),
            (raise_semaphores, (dq_order, semaphore_ptr, tile_order, ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)),
        ], [4, 4, 1, 1, 1], WORKER_REGISTERS)  # fmt: skip


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, marks: Tensor | None, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns contiguous dk and dv, and adds dS K to prepared.dq_sum.

    If prepared.semaphores is not None, the additions to dq_sum have a fixed order. The fused kernel must support the
    call (fused_config.config_of). TMA must be able to load q, k, v and do (descriptors.loadable).
    marks: the tensor to which the NaN marks of dk and dv are written (nan_isolation.new_marks), or None.
    """
    lse_delta, dq_sum, semaphores = prepared.lse_delta, prepared.dq_sum, prepared.semaphores
    assert dq_sum is not None
    n_heads, head_dim = q.shape[1:]
    total_k, n_kv_heads, _ = k.shape
    ordered = semaphores is not None
    group = n_heads // n_kv_heads
    config = config_of(head_dim, q.dtype, features.softcap, ordered, group)
    assert config is not None
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    n_tiles = ceil_div(total_k, BLOCK_N)
    d_2 = split_columns(head_dim)[1]
    descs, rest = columns_of_heads(
        (q, config.block_m), (k, BLOCK_N), (v, BLOCK_N), (do, config.block_m), (dk, BLOCK_N), (dv, BLOCK_N)
    )
    sums, sums_2 = rows_of_heads(dq_sum, 2 * SUM_BLOCK), rows_of_heads(dq_sum, 2 * d_2) if d_2 else None
    n_items = n_tiles * n_kv_heads
    programs, counter = programs_of(n_items, q.device, config.dynamic)
    key_tiles = None if ordered else schedule.key_tiles
    section = n_kv_heads
    if not ordered:
        fewest = fewest_kv_heads(total_k, q.shape[0], schedule.crosses_documents)
        section = kv_heads_per_section(q, n_kv_heads, n_tiles, multiprocessors(q.device), fewest)
    launch(
        _bwd_kernel, (programs,),
        *descs[:4], elements(lse_delta, config.block_m), *descs[4:], sums, *rest, sums_2,
        counter, key_tiles, semaphores, schedule.query_start, schedule.query_end, marks, features.softmax_scale,
        features.softcap, n_items, n_tiles, n_kv_heads, section, total_k, lse_delta.shape[-1],
        q.stride(1), k.stride(1), v.stride(1), do.stride(1),
        CONFIG=config, HAS_SOFTCAP=features.softcap != 0.0, GROUP=group, ALIGNMENT=SUM_BLOCK,
        WORKER_REGISTERS=ORDERED_REGISTERS if ordered else WORKER_REGISTERS, num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip
    return dk, dv
