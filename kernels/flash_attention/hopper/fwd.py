"""The forward pass on Hopper: a warp that loads, warpgroups that compute (FlashAttention-3, arXiv:2407.08608).

Each consumer warpgroup holds 64 queries of a tile. It has Q K^T of one block and P V of the block before on the
tensor cores while it takes the softmax, and takes turns with the other consumers. P never leaves its registers.
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
from kernels.flash_attention.hopper.barriers import pass_turn, wait_turn
from kernels.flash_attention.hopper.descriptors import loadable, rows_of_heads
from kernels.flash_attention.portable.launch import heads_per_section, tile_and_head
from kernels.flash_attention.schedule import WORK_TILE, Schedule
from kernels.flash_attention.scores import cap
from kernels.flash_attention.tiles import interpreted

# nothing that a batch may change is compiled in
_SIZES = ("n_items", "n_tiles", "n_heads", "group", "section", "total_q", "stride_qh", "stride_kh", "stride_vh")
ROWS = 64  # queries of one consumer: what one warpgroup's tensor-core instruction holds

# Stands for an invisible score and for the maximum of nothing. A power of two: its product with the scale is exact,
# so that fma(s, c, -m * c) is 0 for a row that has seen nothing else, and never infinite.
_HIDDEN = gl.constexpr(-(2.0**99))
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ForwardTiles:
    """`consumers` times 64 queries by block_n keys, with `stages` blocks of K and of V in flight."""

    block_n: int
    consumers: int
    stages: int
    consumer_registers: int  # a thread, as setmaxnreg takes them
    producer_registers: int
    launch_registers: int  # what every thread starts with; all warps' must fit in the 64K of an SM

    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {
            "BLOCK_N": self.block_n,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "CONSUMER_REGISTERS": self.consumer_registers,
            "PRODUCER_REGISTERS": self.producer_registers,
        }


FORWARD_TILES = {
    64: ForwardTiles(128, 2, 2, 240, 24, 168),
    128: ForwardTiles(128, 2, 2, 240, 24, 168),
}


@gluon.jit
def _tile(item, order, ranges, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first query and the head of the item, the end of the keys it reads, and its numbers of blocks.

    Blocks are counted backwards from the end: the first n_right of n_blocks are not seen by every row up to their
    end, the last n_left not from their start, and between them are whole ones. At least one, so that rows without
    keys need no path of their own.
    """
    tiles_ptr, n_tiles, n_heads, section = order
    key_start_ptr, key_end_ptr, total_q = ranges
    tile, head = tile_and_head(item, tiles_ptr, n_tiles, n_heads, section, 1)
    first = tile * BLOCK_M
    last = gl.minimum(first + BLOCK_M, total_q) - 1
    start, last_start = gl.load(key_start_ptr + first), gl.load(key_start_ptr + last)
    first_end, end = gl.load(key_end_ptr + first), gl.load(key_end_ptr + last)
    n_blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
    n_right = gl.minimum(gl.cdiv(end - first_end, BLOCK_N), n_blocks)
    n_left = n_blocks - gl.maximum((end - last_start) // BLOCK_N, n_right)
    return first, head, end, n_blocks, n_right, n_left


@gluon.jit
def _first_key(step, end, n_blocks, n_right, n_left, BLOCK_N: gl.constexpr):
    """The first key of the block taken at `step`: the ones that need a mask come first, the whole ones last."""
    whole = n_blocks - n_left - n_right
    block = gl.where(step < n_right, step, gl.where(step < n_right + n_left, step + whole, step - n_left))
    return end - (block + 1) * BLOCK_N


@gluon.jit
def _produce(descriptors, steps, buffers, n_items, order, ranges):
    """One warp: loads the queries of each item, then its blocks of K and V into the rings."""
    q_desc, k_desc, v_desc = descriptors
    stride_qh, stride_kh, stride_vh, group = steps
    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS_EACH: gl.constexpr = q_buffers.shape[1]
    STAGES: gl.constexpr = k_buffers.shape[0]
    BLOCK_N: gl.constexpr = k_buffers.shape[1]
    block = 0  # of all items, for the place in the rings
    phase = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        first, head, end, n_blocks, n_right, n_left = _tile(item, order, ranges, ROWS_EACH * CONSUMERS, BLOCK_N)
        for consumer in gl.static_range(CONSUMERS):  # a barrier each, so that the first can start early
            mbarrier.wait(q_empty.index(consumer), phase ^ 1)
            mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc,
                [first + consumer * ROWS_EACH, head * stride_qh],
                q_full.index(consumer),
                q_buffers.index(consumer),
            )
        for step in range(n_blocks):
            key = _first_key(step, end, n_blocks, n_right, n_left, BLOCK_N)
            stage = block % STAGES
            empty = (block // STAGES) & 1 ^ 1
            mbarrier.wait(k_empty.index(stage), empty)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [key, head // group * stride_kh], k_full.index(stage), k_buffers.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), empty)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [key, head // group * stride_vh], v_full.index(stage), v_buffers.index(stage)
            )
            block += 1
        phase ^= 1


@gluon.jit
def _softmax(scores, row_max, row_sum, softmax_scale, softcap, key, key_start, key_end,
             MASKED: gl.constexpr, HAS_SOFTCAP: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """Takes the scores [M, N] of the keys from `key` on into the running maximum, in units of scores, and sum.

    Returns p [M, N] under the new maximum, the new maximum and sum, and the factor for what the old one summed.
    """
    to_log2 = softmax_scale * _LOG2_E
    if HAS_SOFTCAP:
        scores, _ = cap(scores, softmax_scale, softcap)
        to_log2 = 1.0
    if MASKED:
        column = gl.expand_dims(gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, SCORES)), 0)
        seen = (column >= gl.expand_dims(key_start - key, 1)) & (column < gl.expand_dims(key_end - key, 1))
        scores = gl.where(seen, scores, _HIDDEN)
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    max_log2 = new_max * to_log2
    p = gl.exp2(scores * to_log2 - gl.expand_dims(max_log2, 1))
    rescale = gl.exp2(row_max * to_log2 - max_log2)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _step(step, n_blocks, n_right, n_left, end, block, o, p, row_max, row_sum, q, zeros, k_buffers, v_buffers,
          k_full, k_empty, v_full, v_empty, softmax_scale, softcap, key_start, key_end, MASKED: gl.constexpr,
          HAS_SOFTCAP: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
          SCORES: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """One block of keys; its K has landed. p is of the block before, not yet multiplied with V; o is rescaled.

    Three things ptxas forces. The wait for the next K stands between the exponentials and the wait for P V: it ends
    a basic block, without which the latter wait is hoisted above the exponentials and nothing overlaps. No
    accumulator is in flight over the loop's end, or every product waits for the last (C7512, C7514). And p is
    carried in fp32, since two bf16 in a register would be carried one by one.
    """
    stage, last = block % STAGES, (block - 1) % STAGES
    p_operand = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
    wait_turn(CONSUMER)
    scores_token = warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), ((block - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p_operand, v_buffers.index(last), o, is_async=True)
    pass_turn(CONSUMER, CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores_token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    key = _first_key(step, end, n_blocks, n_right, n_left, scores.shape[1])
    p, row_max, row_sum, rescale = _softmax(
        scores, row_max, row_sum, softmax_scale, softcap, key, key_start, key_end, MASKED, HAS_SOFTCAP, SCORES
    )
    block += 1
    mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1, pred=step + 1 < n_blocks)
    o = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(v_empty.index(last), count=1)
    o = o * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUT)), 1)
    return block, o, p, row_max, row_sum


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr,
    out,
    score,
    buffers,
    n_items,
    order,
    ranges,
    HAS_SINKS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Four warps: the attention of 64 queries of each item."""
    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    o_desc, o_buffers, lse_ptr = out
    sinks_ptr, softmax_scale, softcap = score
    key_start_ptr, key_end_ptr, total_q = ranges
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS_EACH: gl.constexpr = q_buffers.shape[1]
    width: gl.constexpr = q_buffers.shape[2]
    STAGES: gl.constexpr = k_buffers.shape[0]
    BLOCK_N: gl.constexpr = k_buffers.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q = q_buffers.index(CONSUMER)
    o_buffer = o_buffers.index(CONSUMER)
    zeros = gl.zeros([ROWS_EACH, BLOCK_N], gl.float32, layout=SCORES)
    block = 0  # of all items, for the place in the rings
    phase = 0
    if CONSUMER == CONSUMERS - 1:
        pass_turn(CONSUMER, CONSUMERS)  # the first consumer goes first
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        first, head, end, n_blocks, n_right, n_left = _tile(item, order, ranges, ROWS_EACH * CONSUMERS, BLOCK_N)
        first += CONSUMER * ROWS_EACH
        row = first + gl.arange(0, ROWS_EACH, layout=ROW)
        inside = row < total_q
        key_start = gl.load(key_start_ptr + row, mask=inside, other=0)
        key_end = gl.load(key_end_ptr + row, mask=inside, other=0)
        to_log2 = softmax_scale * _LOG2_E
        if HAS_SOFTCAP:
            to_log2 = 1.0
        if HAS_SINKS:  # a logit that every row sees and that has no value
            sink = gl.load(sinks_ptr + head) * _LOG2_E / to_log2
            row_max = gl.full([ROWS_EACH], 1.0, gl.float32, layout=ROW) * sink
            row_sum = gl.full([ROWS_EACH], 1.0, gl.float32, layout=ROW)
        else:
            row_max = gl.full([ROWS_EACH], _HIDDEN, gl.float32, layout=ROW)
            row_sum = gl.zeros([ROWS_EACH], gl.float32, layout=ROW)
        o = gl.zeros([ROWS_EACH, width], gl.float32, layout=OUT)

        mbarrier.wait(q_full.index(CONSUMER), phase)
        stage = block % STAGES
        mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
        wait_turn(CONSUMER)
        scores_token = warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        pass_turn(CONSUMER, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        key = _first_key(0, end, n_blocks, n_right, n_left, BLOCK_N)
        p, row_max, row_sum, _ = _softmax(
            scores, row_max, row_sum, softmax_scale, softcap, key, key_start, key_end, True, HAS_SOFTCAP, SCORES
        )
        block += 1
        mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1, pred=n_blocks > 1)

        n_masked = gl.maximum(n_right + n_left, 1)
        for step in range(1, n_masked):
            block, o, p, row_max, row_sum = _step(
                step, n_blocks, n_right, n_left, end, block, o, p, row_max, row_sum, q, zeros, k_buffers, v_buffers,
                k_full, k_empty, v_full, v_empty, softmax_scale, softcap, key_start, key_end, True, HAS_SOFTCAP,
                CONSUMER, CONSUMERS, STAGES, SCORES, OUT,
            )  # fmt: skip
        for step in range(n_masked, n_blocks):
            block, o, p, row_max, row_sum = _step(
                step, n_blocks, n_right, n_left, end, block, o, p, row_max, row_sum, q, zeros, k_buffers, v_buffers,
                k_full, k_empty, v_full, v_empty, softmax_scale, softcap, key_start, key_end, False, HAS_SOFTCAP,
                CONSUMER, CONSUMERS, STAGES, SCORES, OUT,
            )  # fmt: skip

        mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        stage = (block - 1) % STAGES
        p_operand = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
        mbarrier.wait(v_full.index(stage), ((block - 1) // STAGES) & 1)
        o_token = warpgroup_mma(p_operand, v_buffers.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_empty.index(stage), count=1)

        sees = row_max > 0.5 * _HIDDEN  # a row that sees no key gives 0 and -inf
        lse = gl.where(sees, (row_max * to_log2 + gl.log2(row_sum)) * _LN_2, float("-inf"))
        gl.store(lse_ptr + head.to(gl.int64) * total_q + row, lse, mask=inside)
        # where, not a product with 0: the values of keys that nobody sees may be infinite
        o_sees = gl.expand_dims(gl.convert_layout(sees.to(gl.int32), gl.SliceLayout(1, OUT)), 1) != 0
        o = o * gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUT)), 1)
        o = gl.where(o_sees, o, 0.0)
        tma.store_wait(0)  # the item before has left the buffer
        o_buffer.store(o.to(o_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [first, head * width], o_buffer)
        phase ^= 1
    tma.store_wait(0)
    if CONSUMER == 0:
        wait_turn(CONSUMER)  # the last consumer's last pass, which nobody waited for


@gluon.jit(do_not_specialize=_SIZES)
def _fwd_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, tiles_ptr, key_start_ptr, key_end_ptr,
                n_items, n_tiles, n_heads, group, section, total_q, stride_qh, stride_kh, stride_vh, softmax_scale,
                softcap, HAS_SINKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
                CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """Program i works the items i, i + programs, ...; o is (total_q, n_heads, head_dim), lse (n_heads, total_q)."""
    ROWS_EACH: gl.constexpr = q_desc.block_type.shape[0]
    WIDTH: gl.constexpr = q_desc.block_type.shape[1]
    q_buffers = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS_EACH, WIDTH], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, WIDTH], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, WIDTH], v_desc.layout)
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, ROWS_EACH, WIDTH], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    buffers = (q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    order = (tiles_ptr, n_tiles, n_heads, section)
    ranges = (key_start_ptr, key_end_ptr, total_q)
    descriptors = (q_desc, k_desc, v_desc)
    steps = (stride_qh, stride_kh, stride_vh, group)
    out = (o_desc, o_buffers, lse_ptr)
    score = (sinks_ptr, softmax_scale, softcap)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, out, score, buffers, n_items, order, ranges, HAS_SINKS, HAS_SOFTCAP)),
                (_consume, (1, out, score, buffers, n_items, order, ranges, HAS_SINKS, HAS_SOFTCAP)),
                (_produce, (descriptors, steps, buffers, n_items, order, ranges)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, out, score, buffers, n_items, order, ranges, HAS_SINKS, HAS_SOFTCAP)),
                (_consume, (1, out, score, buffers, n_items, order, ranges, HAS_SINKS, HAS_SOFTCAP)),
                (_consume, (2, out, score, buffers, n_items, order, ranges, HAS_SINKS, HAS_SOFTCAP)),
                (_produce, (descriptors, steps, buffers, n_items, order, ranges)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def supports(q: Tensor, k: Tensor, v: Tensor, features: Features, out_dtype: torch.dtype) -> bool:
    """Whether this path takes the call; the portable kernels take what it does not."""
    return (
        not interpreted()
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and out_dtype in (q.dtype, torch.float32)
        and q.shape[2] == v.shape[2]
        and q.shape[2] in FORWARD_TILES
        and not features.alibi
        and all(loadable(x) for x in (q, k, v))
    )


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse fp32."""
    return run_forward(q, k, v, schedule, features, out_dtype, FORWARD_TILES[q.shape[2]], persistent=False)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    tiles: ForwardTiles,
    *,
    persistent: bool,
) -> tuple[Tensor, Tensor]:
    """attention_forward with tiles of choice, by one program an SM (`persistent`) or one a tile and head."""
    total_q, n_heads, head_dim = q.shape
    o = torch.empty(total_q, n_heads, head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(n_heads, total_q, dtype=torch.float32, device=q.device)
    assert tiles.consumers * ROWS == WORK_TILE, tiles
    n_tiles = schedule.query_tiles.numel()
    n_items = n_tiles * n_heads
    programs = n_items
    if persistent:
        programs = min(n_items, torch.cuda.get_device_properties(q.device).multi_processor_count)
    sinks = lse if features.sinks is None else features.sinks  # any pointer will do where none is read
    _fwd_kernel[(programs,)](
        rows_of_heads(q, ROWS), rows_of_heads(k, tiles.block_n), rows_of_heads(v, tiles.block_n),
        rows_of_heads(o, ROWS), lse, sinks, schedule.query_tiles, schedule.key_start, schedule.key_end,
        n_items, n_tiles, n_heads, n_heads // k.shape[1], heads_per_section(k, v, n_heads), total_q,
        q.stride(1), k.stride(1), v.stride(1), features.softmax_scale, features.softcap,
        HAS_SINKS=features.sinks is not None, HAS_SOFTCAP=features.softcap != 0.0, **tiles.constants(),
        num_warps=4, maxnreg=tiles.launch_registers,
    )  # fmt: skip
    return o, lse
