"""The forward kernel for Hopper: one warp loads, and two or three warpgroups compute (as in FlashAttention-3).

A work item is a tile of queries of one head. The producer warp draws items, posts them for the consumers (queue.py),
and loads Q, K and V into ring buffers by TMA. Each of two or three consumer warpgroups owns 64 queries of the tile.
A consumer starts the matmul Q K^T of one block of keys, and at the same time the matmul P V of the previous block. The
consumer computes the softmax of Q K^T (softmax.py) while the tensor cores compute P V. P stays in registers.

Each place of a ring buffer has two mbarriers. `full` means that the data has arrived by TMA. `empty` means that the
consumers have read the data. With ping-pong, named barriers let consumers use the tensor cores in turn (barriers.py).
config.py chooses the options of the kernel for a call.

The kernel cannot deadlock. The producer fills places in the order in which the consumers empty them. Each consumer
waits for every block of an item and releases the block, even if the consumer does not visit the block.

NaN isolation: if a call may have several documents, the kernel marks the output rows that contain NaN (nan_marks.py).
The portable kernels then recompute the tiles that contain marked rows (portable/repair.py).

Source: arXiv:2407.08608.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.forward.config import ROWS, ForwardConfig, forward_config
from fa_kernels.flash_attention.hopper.forward.consumer import Work, consume
from fa_kernels.flash_attention.hopper.forward.items import Inputs, Rings, produce
from fa_kernels.flash_attention.hopper.forward.output import Output
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP
from fa_kernels.flash_attention.hopper.primitives.columns import column_blocks, new_buffers
from fa_kernels.flash_attention.hopper.primitives.queue import new_queue, programs_of
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, new_barriers
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale, TileOrder
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.portable.repair import repair_forward
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.flash_attention.tile_order import heads_per_section
from fa_kernels.launch.descriptors import columns_of_heads
from fa_kernels.launch.record import launch

# Kernel arguments that differ between batches. Triton must not compile a new kernel for each value of these arguments.
_SIZES = ("n_items", "n_tiles", "n_heads", "group", "section", "total_q", "stride_qh", "stride_kh", "stride_vh")


@gluon.jit(do_not_specialize=_SIZES)
def _fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, q_2_desc, k_2_desc, v_2_desc, o_2_desc, lse_ptr, sinks_ptr, counter_ptr,
    tiles_ptr, key_start_ptr, key_end_ptr, marks_ptr, n_items, n_tiles, n_heads, group, section, total_q,
    stride_qh, stride_kh, stride_vh, softmax_scale, softcap,
    CONFIG: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Program i processes work item i, and then draws further items from the queue (queue.py).

    Shapes: o (total_q, n_heads, head_dim), lse (n_heads, total_q). q_desc, k_desc and so on describe the first column
    block of each head. q_2_desc, k_2_desc and so on describe the second column block, and are None if heads have only
    one column block. marks_ptr: the pointer to the NaN marks of o (nan_marks.py), or None.
    """
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMER_REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER_REGISTERS: gl.constexpr = CONFIG.producer_registers
    q_descs, k_descs = column_blocks(q_desc, q_2_desc), column_blocks(k_desc, k_2_desc)
    v_descs, o_descs = column_blocks(v_desc, v_2_desc), column_blocks(o_desc, o_2_desc)
    q_bufs, k_bufs, v_bufs = new_buffers(q_descs, CONSUMERS), new_buffers(k_descs, STAGES), new_buffers(v_descs, STAGES)
    o_bufs = q_bufs if CONFIG.o_in_q else new_buffers(o_descs, CONSUMERS)
    rings = Rings(
        Ring(q_bufs, new_barriers(CONSUMERS), new_barriers(CONSUMERS)),
        Ring(k_bufs, new_barriers(STAGES), new_barriers(STAGES)),
        Ring(v_bufs, new_barriers(STAGES), new_barriers(STAGES)),
    )
    queue = new_queue(CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(rings.q.full.index(i), count=1)
        mbarrier.init(rings.q.empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(rings.k.full.index(i), count=1)
        mbarrier.init(rings.k.empty.index(i), count=CONSUMERS * WARPGROUP)
        mbarrier.init(rings.v.full.index(i), count=1)
        mbarrier.init(rings.v.empty.index(i), count=CONSUMERS * WARPGROUP)
    tile_order = TileOrder(tiles_ptr, n_tiles, n_heads, section)
    ranges = Ranges(key_start_ptr, key_end_ptr, total_q)
    inputs = Inputs(q_descs, k_descs, v_descs, stride_qh, stride_kh, stride_vh, group)
    out = Output(o_descs, o_bufs, marks_ptr)
    work = Work(out, lse_ptr, sinks_ptr, Scale(softmax_scale, softcap), rings, queue, ranges)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, work, CONFIG, HAS_SINKS, HAS_SOFTCAP)),
            (consume, (1, work, CONFIG, HAS_SINKS, HAS_SOFTCAP)),
            (produce, (inputs, rings, queue, counter_ptr, n_items, tile_order, ranges, CONFIG)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, work, CONFIG, HAS_SINKS, HAS_SOFTCAP)),
            (consume, (1, work, CONFIG, HAS_SINKS, HAS_SOFTCAP)),
            (consume, (2, work, CONFIG, HAS_SINKS, HAS_SOFTCAP)),
            (produce, (inputs, rings, queue, counter_ptr, n_items, tile_order, ranges, CONFIG)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def uses_sections(schedule: Schedule) -> bool:
    """Returns whether the heads are divided into sections whose K and V fit in L2 (tile_order.py).

    Short documents need no sections. Short documents run one after another, and K and V of all heads of one document
    fit in L2.
    """
    return schedule.length_class in ("long", "very_long") or not schedule.crosses_documents


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    config: ForwardConfig,
) -> tuple[Tensor, Tensor]:
    """Computes `attention_forward` with the given configuration of the kernel."""
    total_q, n_heads, head_dim = q.shape
    o = torch.empty(total_q, n_heads, head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(n_heads, total_q, dtype=torch.float32, device=q.device)
    # Tiles of two consumers have WORK_TILE queries, and tiles of three consumers have WIDE_TILE queries.
    tiles = schedule.query_tiles if config.consumers == 2 else schedule.wide_query_tiles
    n_tiles = tiles.numel()
    section = heads_per_section(k, v, n_heads) if uses_sections(schedule) else n_heads
    n_items = n_tiles * n_heads
    programs, counter = programs_of(n_items, q.device, dynamic=True)
    marks = new_marks(n_heads, total_q, q.device) if schedule.crosses_documents else None
    descs, rest = columns_of_heads((q, ROWS), (k, config.block_n), (v, config.block_n), (o, ROWS))
    launch(
        _fwd_kernel, (programs,),
        *descs, *rest, lse,
        lse if features.sinks is None else features.sinks, counter, tiles, schedule.key_start, schedule.key_end,
        marks, n_items, n_tiles, n_heads, n_heads // k.shape[1], section, total_q,
        q.stride(1), k.stride(1), v.stride(1), features.softmax_scale, features.softcap,
        CONFIG=config, HAS_SINKS=features.sinks is not None, HAS_SOFTCAP=features.softcap != 0.0,
        num_warps=4, maxnreg=config.start_registers,
    )  # fmt: skip
    if marks is not None:
        repair_forward(q, k, v, o, lse, marks, schedule, features)
    return o, lse


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns o in out_dtype, and lse in fp32.

    Shapes: q (total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o like q, lse (n_heads, total_q).
    """
    config = forward_config(q.shape[2], schedule.length_class, out_dtype == torch.float32)
    return run_forward(q, k, v, schedule, features, out_dtype, config)
