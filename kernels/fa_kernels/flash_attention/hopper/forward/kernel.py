"""The forward pass on Hopper: a warp that loads, warpgroups that compute (FlashAttention-3, arXiv:2407.08608).

An item of work is a tile of queries of one head. One warp, the producer, takes items, tells the consumers what it
found (queue.py), and loads Q, K and V through TMA into rings of shared memory. Each consumer warpgroup holds 64 queries
of the tile. It begins Q K^T of one block and P V of the block before together, and takes the softmax of the one
(softmax.py) while the tensor cores may still be at the other. P never leaves its registers.

What differs between head dimensions and documents, the best on balance of what was tried on an H200 (runs 21 to 23 and
25 of scripts/results/hopper_kernels_h200_202611.md; bf16, causal, TFLOP/s; 16k: one document of 16k tokens, and so on):

- Which program works which item. A persistent grid that takes items from a counter (`dynamic`) is best where items are
  short, which leave the start and the end of a program bare: at head_dim 128, without turns, 2k 523, where one program
  an item gives 453, 16k 696 and 666.
- Consumers together or each on its own. Together, they visit all blocks of the tile, and may take `turns`: one has the
  tensor cores while the others take their softmax. At head_dim 128 that gives 548 at 2k for 523, but at 64k 705 for
  728; at 96 555 at 16k for 518. On its own (`ranged`), a consumer visits the blocks that its own 64 queries see: best
  for short documents, of 64 to 512 tokens, with blocks of 64 keys: at head_dim 128 223, together and with 128 keys 178,
  at 96 181 and 145, at 256 231 for 219.
- How many consumers. Three read K and V less often, which head_dim 64 needs: with maxima first 532 at 16k, two give 463
  at best. At 96, with blocks of 64 keys, 608, two 580; at 128k 637 and 599; with six stages of them, in another run,
  613 for four's 606, log-normal documents 547 for 522. But tiles of 192 queries waste many blocks on shorter documents:
  at 2k 345 and 392, at 96 405 and 462.
- What the registers hold during the softmax: scores and probabilities (softmax.py), and as a rule P of the block
  before, which P V reads. Three consumers have no room for it with 128 keys at 64, and little with 64 at 96, and wait
  for P V before the softmax (`pv_first`): 565 at 64 and 16k, where `max_first`, which has no need of the scores beside
  the probabilities, gives 527; 608 at 96 for 574. For short documents `max_first` is a little better at 64 (154 for
  149), and at head_dim 256 for those of 1k and 2k (2k 538 for 533).
- Where o leaves. At head_dim 256 there is no room but that of q (`o_in_q`).

What is of a head's columns is a tuple of parts, one or, at head_dim 96, two (columns.py).

Where there are several documents, NaN of one that came into another through a tile of both is repaired (nan_marks.py).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from fa_kernels.device import LOG2_E, interpreted, is_hopper
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.forward import columns as parts
from fa_kernels.flash_attention.hopper.forward import softmax
from fa_kernels.flash_attention.hopper.forward.softmax import HIDDEN, LN_2
from fa_kernels.flash_attention.hopper.primitives.barriers import WARPGROUP, hand_back, pass_turn, wait_turn
from fa_kernels.flash_attention.hopper.primitives.queue import field, item_of, new_queue, post, programs_of, read, take
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.portable.repair import repair_forward
from fa_kernels.flash_attention.schedule import WIDE_TILE, WORK_TILE, LengthClass, Schedule
from fa_kernels.flash_attention.tile_order import heads_per_section, tile_and_head
from fa_kernels.launch.descriptors import columns_of_heads, loadable
from fa_kernels.launch.record import launch

# nothing that a batch may change is compiled in
_SIZES = ("n_items", "n_tiles", "n_heads", "group", "section", "total_q", "stride_qh", "stride_kh", "stride_vh")
ROWS = 64  # queries of one consumer: what one warpgroup's tensor-core instruction holds


@dataclass(frozen=True)
class ForwardTiles:
    """`consumers` times 64 queries by block_n keys, with `stages` blocks of K and of V in flight."""

    block_n: int
    consumers: int
    stages: int
    order: Literal["query_tiles", "wide_query_tiles"]  # the schedule's
    dynamic: bool = True
    ranged: bool = False
    turns: bool = False
    max_first: bool = False
    pv_first: bool = False
    o_in_q: bool = False

    def registers(self) -> tuple[int, int, int]:
        """A thread: of consumers and of the producer, as setmaxnreg takes them, and what every thread starts with.

        All warps' must fit in the 64K of an SM, before and after.
        """
        return (240, 24, 168) if self.consumers == 2 else (160, 32, 128)

    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        consumer_registers, producer_registers, _ = self.registers()
        return {
            "BLOCK_N": self.block_n,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "RANGED": self.ranged,
            "TURNS": self.turns,
            "MAX_FIRST": self.max_first,
            "PV_FIRST": self.pv_first,
            "O_IN_Q": self.o_in_q,
            "CONSUMER_REGISTERS": consumer_registers,
            "PRODUCER_REGISTERS": producer_registers,
        }


# by head_dim
FORWARD_TILES = {
    64: ForwardTiles(128, 2, 3, "query_tiles", turns=True),
    96: ForwardTiles(128, 2, 3, "query_tiles", turns=True),
    128: ForwardTiles(128, 2, 2, "query_tiles", turns=True),
    256: ForwardTiles(64, 2, 2, "query_tiles", turns=True, o_in_q=True),
}
_LONG = {
    64: ForwardTiles(128, 3, 3, "wide_query_tiles", turns=True, pv_first=True),
    96: ForwardTiles(64, 3, 6, "wide_query_tiles", turns=True, pv_first=True),
}
WIDE_O_STAGES = 4  # at most, where o is of fp32 and takes the room of more
# where documents are not of medium length (schedule.length_class_of) and these are faster
OTHER_TILES: dict[LengthClass, dict[int, ForwardTiles]] = {
    "short": {
        64: ForwardTiles(64, 3, 4, "wide_query_tiles", ranged=True, max_first=True),
        96: ForwardTiles(64, 2, 4, "query_tiles", ranged=True),
        128: ForwardTiles(64, 2, 4, "query_tiles", ranged=True),
        256: ForwardTiles(64, 2, 2, "query_tiles", ranged=True, o_in_q=True),
    },
    "medium": {
        256: ForwardTiles(64, 2, 2, "query_tiles", dynamic=False, turns=True, max_first=True, o_in_q=True),
    },
    "long": _LONG,
    "very_long": _LONG | {128: ForwardTiles(128, 2, 2, "query_tiles")},
}


def forward_tiles(head_dim: int, length_class: LengthClass, wide_o: bool = False) -> ForwardTiles:
    """What attention_forward takes; wide_o: whether o is of fp32."""
    tiles = OTHER_TILES[length_class].get(head_dim, FORWARD_TILES[head_dim])
    return replace(tiles, stages=min(tiles.stages, WIDE_O_STAGES)) if wide_o else tiles


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
def _blocks_of_rows(first, end, n_blocks, ranges, BLOCK_N: gl.constexpr):
    """Of 64 rows from `first` on: which of the item's blocks they visit, and which of those need no mask.

    Blocks begin <= b < stop are visited, in the order of b; right <= b < left are seen whole by every row. Rows past
    the last query are worked as the last one.
    """
    key_start_ptr, key_end_ptr, total_q = ranges
    first = gl.minimum(first, total_q - 1)
    last = gl.minimum(first + 64, total_q) - 1
    start, last_start = gl.load(key_start_ptr + first), gl.load(key_start_ptr + last)
    first_end, last_end = gl.load(key_end_ptr + first), gl.load(key_end_ptr + last)
    begin = gl.minimum((end - last_end) // BLOCK_N, n_blocks - 1)
    stop = gl.maximum(gl.cdiv(end - start, BLOCK_N), begin + 1)
    return begin, stop, gl.cdiv(end - first_end, BLOCK_N), (end - last_start) // BLOCK_N


@gluon.jit
def _produce(loads, RANGED: gl.constexpr):
    """One warp: takes items, loads the queries of each, then its blocks of K and V into the rings."""
    descriptors, strides, buffers, queue, counter_ptr, n_items, order, ranges = loads
    q_descs, k_descs, v_descs = descriptors
    stride_qh, stride_kh, stride_vh, group = strides
    q_buffers, q_full, q_empty, rings = buffers
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = rings
    CONSUMERS: gl.constexpr = q_buffers[0].shape[0]
    ROWS_EACH: gl.constexpr = q_buffers[0].shape[1]
    STAGES: gl.constexpr = k_buffers[0].shape[0]
    BLOCK_N: gl.constexpr = k_buffers[0].shape[1]
    block = 0  # of all items, for the place in the rings
    turn = 0
    item = gl.program_id(0)
    while item < n_items:
        first, head, end, n_blocks, n_right, n_left = _tile(item, order, ranges, ROWS_EACH * CONSUMERS, BLOCK_N)
        if RANGED:
            found = (first, head, end, n_blocks)
            for consumer in gl.static_range(CONSUMERS):
                found = found + _blocks_of_rows(first + consumer * ROWS_EACH, end, n_blocks, ranges, BLOCK_N)
            post(queue, turn, found)
        else:
            post(queue, turn, (first, head, end, n_blocks, n_right, n_left))
        if counter_ptr is not None:
            ticket = take(counter_ptr)
        for consumer in gl.static_range(CONSUMERS):  # a barrier each, so that the first can start early
            mbarrier.wait(q_empty.index(consumer), turn & 1 ^ 1)
            row = first + consumer * ROWS_EACH
            parts.start_load(q_descs, row, head * stride_qh, q_full.index(consumer), q_buffers, consumer)
        for step in range(n_blocks):
            if RANGED:
                key = end - (step + 1) * BLOCK_N
            else:
                key = _first_key(step, end, n_blocks, n_right, n_left, BLOCK_N)
            stage = block % STAGES
            empty = (block // STAGES) & 1 ^ 1
            mbarrier.wait(k_empty.index(stage), empty)
            parts.start_load(k_descs, key, head // group * stride_kh, k_full.index(stage), k_buffers, stage)
            mbarrier.wait(v_empty.index(stage), empty)
            parts.start_load(v_descs, key, head // group * stride_vh, v_full.index(stage), v_buffers, stage)
            block += 1
        turn += 1
        if counter_ptr is not None:
            item = item_of(ticket, counter_ptr, n_items)
        else:
            item = n_items
    post(queue, turn, (-1,))


@gluon.jit
def _pass_over(block, rings):
    """A block that this consumer does not visit; the waits keep it from answering for a stage's next block."""
    k_buffers, _, k_full, k_empty, v_full, v_empty = rings
    STAGES: gl.constexpr = k_buffers[0].shape[0]
    stage, phase = block % STAGES, (block // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    hand_back(k_empty.index(stage))
    mbarrier.wait(v_full.index(stage), phase)
    hand_back(v_empty.index(stage))
    return block + 1


@gluon.jit
def _step(key, at_edge, more, block, o, p, row_max, row_sum, q, zeros, rings, scores_of, CONSUMER: gl.constexpr,
          CONSUMERS: gl.constexpr, MASK: gl.constexpr, HAS_SOFTCAP: gl.constexpr, TURNS: gl.constexpr,
          MAX_FIRST: gl.constexpr, PV_FIRST: gl.constexpr):  # fmt: skip
    """One block of keys, from `key` on; its K has landed, and if there are `more`, the next one's will have.

    p is of the block before, not yet multiplied with V; o is rescaled.

    Three things ptxas forces. The wait for the next K stands between the exponentials and the wait for P V, unless that
    comes first: it ends a basic block, without which the latter wait is hoisted above the exponentials and nothing
    overlaps. No accumulator is in flight over the loop's end, or every product waits for the last (C7512, C7514). And p
    is carried as packed pairs, since two bf16 in a register would be carried one by one.
    """
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = rings
    softmax_scale, softcap, key_start, key_end = scores_of
    STAGES: gl.constexpr = k_buffers[0].shape[0]
    dtype: gl.constexpr = q[0].dtype
    stage, last = block % STAGES, (block - 1) % STAGES
    p_operands = parts.operands(p, o, q)
    if TURNS:
        wait_turn(CONSUMER)
    scores_token = parts.begin_scores(q, k_buffers, stage, zeros)
    mbarrier.wait(v_full.index(last), ((block - 1) // STAGES) & 1)
    o_tokens = parts.begin_values(p_operands, v_buffers, last, o)
    if TURNS:
        pass_turn(CONSUMER, CONSUMERS)
    if PV_FIRST:
        values = parts.wait_for((scores_token,) + o_tokens)  # noqa: RUF005  Gluon knows no stars
        scores, o = values[0], values[1:]
        hand_back(v_empty.index(last))
    else:
        scores = warpgroup_mma_wait(len(o), deps=[scores_token])
    hand_back(k_empty.index(stage))
    scores = softmax.visible(scores, softmax_scale, softcap, key, key_start, key_end, at_edge, dtype, MASK, HAS_SOFTCAP)
    p, row_max, row_sum, factor = softmax.exponentials(
        scores, row_max, row_sum, softmax_scale, dtype, HAS_SOFTCAP, MAX_FIRST
    )
    block += 1
    mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1, pred=more)
    if not PV_FIRST:
        o = parts.wait_for(o_tokens)
        hand_back(v_empty.index(last))
    o = parts.rescale(o, factor)
    return block, o, p, row_max, row_sum


@gluon.jit
def _consume(CONSUMER: gl.constexpr, work, HAS_SINKS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, RANGED: gl.constexpr,
             TURNS: gl.constexpr, MAX_FIRST: gl.constexpr, PV_FIRST: gl.constexpr, O_IN_Q: gl.constexpr):  # fmt: skip
    """Four warps: the attention of 64 queries of each item."""
    out, lse_ptr, score, buffers, queue, ranges = work
    q_buffers, q_full, q_empty, rings = buffers
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = rings
    sinks_ptr, softmax_scale, softcap = score
    key_start_ptr, key_end_ptr, total_q = ranges
    CONSUMERS: gl.constexpr = q_buffers[0].shape[0]
    ROWS_EACH: gl.constexpr = q_buffers[0].shape[1]
    STAGES: gl.constexpr = k_buffers[0].shape[0]
    BLOCK_N: gl.constexpr = k_buffers[0].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = q_buffers[0].dtype
    q = parts.at(q_buffers, CONSUMER)
    zeros = gl.zeros([ROWS_EACH, BLOCK_N], gl.float32, layout=SCORES)
    to_log2 = softmax.scale_to_log2(softmax_scale, HAS_SOFTCAP)
    block = 0  # of all items, for the place in the rings
    turn = 0
    if CONSUMER == CONSUMERS - 1 and TURNS:
        pass_turn(CONSUMER, CONSUMERS)  # the first consumer goes first
    item = read(queue, turn)
    while field(item, 0) >= 0:
        first, head, end, n_blocks = field(item, 0), field(item, 1), field(item, 2), field(item, 3)
        first += CONSUMER * ROWS_EACH
        row = first + gl.arange(0, ROWS_EACH, layout=ROW)
        inside = row < total_q
        key_start = gl.load(key_start_ptr + row, mask=inside, other=0)
        key_end = gl.load(key_end_ptr + row, mask=inside, other=0)
        scores_of = (softmax_scale, softcap, key_start, key_end)
        sink = 0.0
        if HAS_SINKS:
            sink = gl.load(sinks_ptr + head) * LOG2_E / to_log2
        row_max, row_sum = softmax.begin(sink, ROWS_EACH, HAS_SINKS)
        o = parts.no_output(q)
        if RANGED:
            begin, stop = field(item, 4 + 4 * CONSUMER), field(item, 5 + 4 * CONSUMER)
            right, left = field(item, 6 + 4 * CONSUMER), field(item, 7 + 4 * CONSUMER)
            key = end - (begin + 1) * BLOCK_N
            for _ in range(begin):
                block = _pass_over(block, rings)
        else:
            begin, stop = 0, n_blocks
            n_right, n_left = field(item, 4), field(item, 5)
            key = _first_key(0, end, n_blocks, n_right, n_left, BLOCK_N)

        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        stage = block % STAGES
        mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
        if TURNS:
            wait_turn(CONSUMER)
        scores_token = parts.begin_scores(q, k_buffers, stage, zeros)
        if TURNS:
            pass_turn(CONSUMER, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
        hand_back(k_empty.index(stage))
        scores = softmax.visible(
            scores, softmax_scale, softcap, key, key_start, key_end, True, dtype, "always", HAS_SOFTCAP
        )
        p, row_max, row_sum, _ = softmax.exponentials(scores, row_max, row_sum, softmax_scale, dtype, HAS_SOFTCAP, True)
        block += 1
        mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1, pred=begin + 1 < stop)

        if RANGED:
            for step in range(begin + 1, stop):
                key = end - (step + 1) * BLOCK_N
                block, o, p, row_max, row_sum = _step(
                    key, (step < right) | (step >= left), step + 1 < stop, block, o, p, row_max, row_sum, q, zeros,
                    rings, scores_of, CONSUMER, CONSUMERS, "at_edge", HAS_SOFTCAP, TURNS, MAX_FIRST, PV_FIRST,
                )  # fmt: skip
        else:
            n_masked = gl.maximum(n_right + n_left, 1)
            for step in range(1, n_masked):
                key = _first_key(step, end, n_blocks, n_right, n_left, BLOCK_N)
                block, o, p, row_max, row_sum = _step(
                    key, True, step + 1 < stop, block, o, p, row_max, row_sum, q, zeros,
                    rings, scores_of, CONSUMER, CONSUMERS, "always", HAS_SOFTCAP, TURNS, MAX_FIRST, PV_FIRST,
                )  # fmt: skip
            for step in range(n_masked, n_blocks):
                key = _first_key(step, end, n_blocks, n_right, n_left, BLOCK_N)
                block, o, p, row_max, row_sum = _step(
                    key, False, step + 1 < stop, block, o, p, row_max, row_sum, q, zeros,
                    rings, scores_of, CONSUMER, CONSUMERS, "never", HAS_SOFTCAP, TURNS, MAX_FIRST, PV_FIRST,
                )  # fmt: skip

        if not O_IN_Q:
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        stage = (block - 1) % STAGES
        p_operands = parts.operands(p, o, q)
        mbarrier.wait(v_full.index(stage), ((block - 1) // STAGES) & 1)
        o = parts.wait_for(parts.begin_values(p_operands, v_buffers, stage, o))
        hand_back(v_empty.index(stage))
        if RANGED:
            for _ in range(stop, n_blocks):
                block = _pass_over(block, rings)

        row_max, row_sum = softmax.of_rows(row_max, row_sum, ROW)
        # a row that sees no key gives 0 and -inf; one that sees nothing but NaN keeps its maximum too
        sees = (row_max > 0.5 * HIDDEN) | (row_sum != row_sum)
        lse = gl.where(sees, (row_max * to_log2 + gl.log2(row_sum)) * LN_2, float("-inf"))
        gl.store(lse_ptr + head.to(gl.int64) * total_q + row, lse, mask=inside)
        parts.store(o, row_sum, sees, first, head, total_q, out, CONSUMER)
        if O_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        turn += 1
        item = read(queue, turn)
    tma.store_wait(0)
    if CONSUMER == 0 and TURNS:
        wait_turn(CONSUMER)  # the last consumer's last pass, which nobody waited for


@gluon.jit(do_not_specialize=_SIZES)
def _fwd_kernel(q_desc, k_desc, v_desc, o_desc, q_2_desc, k_2_desc, v_2_desc, o_2_desc, lse_ptr, sinks_ptr, counter_ptr,
                tiles_ptr, key_start_ptr, key_end_ptr, spoiled_ptr, n_items, n_tiles, n_heads, group, section, total_q,
                stride_qh, stride_kh, stride_vh, softmax_scale, softcap, HAS_SINKS: gl.constexpr,
                HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
                RANGED: gl.constexpr, TURNS: gl.constexpr, MAX_FIRST: gl.constexpr,
                PV_FIRST: gl.constexpr, O_IN_Q: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """Program i works item i, and then others if there is a counter of them.

    Shapes: o (total_q, n_heads, head_dim), lse (n_heads, total_q). Descriptors are of a head's first columns, and with
    a 2 of those after them, None where there are none. spoiled is None, or where to mark NaN (nan_marks.py).
    """
    q_descs, k_descs = parts.one_or_two(q_desc, q_2_desc), parts.one_or_two(k_desc, k_2_desc)
    v_descs, o_descs = parts.one_or_two(v_desc, v_2_desc), parts.one_or_two(o_desc, o_2_desc)
    q_buffers = parts.new_buffers(q_descs, CONSUMERS)
    k_buffers, v_buffers = parts.new_buffers(k_descs, STAGES), parts.new_buffers(v_descs, STAGES)
    o_buffers = q_buffers if O_IN_Q else parts.new_buffers(o_descs, CONSUMERS)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = new_queue(CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS * WARPGROUP)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS * WARPGROUP)

    rings = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
    buffers = (q_buffers, q_full, q_empty, rings)
    order = (tiles_ptr, n_tiles, n_heads, section)
    ranges = (key_start_ptr, key_end_ptr, total_q)
    descriptors = (q_descs, k_descs, v_descs)
    strides = (stride_qh, stride_kh, stride_vh, group)
    out = (o_descs, o_buffers, spoiled_ptr)
    score = (sinks_ptr, softmax_scale, softcap)
    work = (out, lse_ptr, score, buffers, queue, ranges)
    loads = (descriptors, strides, buffers, queue, counter_ptr, n_items, order, ranges)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, work, HAS_SINKS, HAS_SOFTCAP, RANGED, TURNS, MAX_FIRST, PV_FIRST, O_IN_Q)),
                (_consume, (1, work, HAS_SINKS, HAS_SOFTCAP, RANGED, TURNS, MAX_FIRST, PV_FIRST, O_IN_Q)),
                (_produce, (loads, RANGED)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, work, HAS_SINKS, HAS_SOFTCAP, RANGED, TURNS, MAX_FIRST, PV_FIRST, O_IN_Q)),
                (_consume, (1, work, HAS_SINKS, HAS_SOFTCAP, RANGED, TURNS, MAX_FIRST, PV_FIRST, O_IN_Q)),
                (_consume, (2, work, HAS_SINKS, HAS_SOFTCAP, RANGED, TURNS, MAX_FIRST, PV_FIRST, O_IN_Q)),
                (_produce, (loads, RANGED)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def supports(q: Tensor, k: Tensor, v: Tensor, features: Features, out_dtype: torch.dtype) -> bool:
    """Whether this path takes the call; the portable kernels take what it does not."""
    return (
        q.is_cuda
        and not interpreted()
        and is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and out_dtype in (q.dtype, torch.float32)
        and q.shape[2] == v.shape[2]
        and q.shape[2] in FORWARD_TILES
        and (out_dtype == q.dtype or not FORWARD_TILES[q.shape[2]].o_in_q)  # no room for a wider o
        and not features.alibi
        and loadable(q)
        and loadable(k)
        and loadable(v)
    )


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, features: Features, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(total_q, n_heads, head_dim), k and v (total_k, n_kv_heads, head_dim) -> o in out_dtype, lse fp32."""
    tiles = forward_tiles(q.shape[2], schedule.length_class, out_dtype == torch.float32)
    return run_forward(q, k, v, schedule, features, out_dtype, tiles)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    features: Features,
    out_dtype: torch.dtype,
    tiles: ForwardTiles,
) -> tuple[Tensor, Tensor]:
    """attention_forward with tiles of choice."""
    total_q, n_heads, head_dim = q.shape
    o = torch.empty(total_q, n_heads, head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(n_heads, total_q, dtype=torch.float32, device=q.device)
    order: Tensor = getattr(schedule, tiles.order)
    assert tiles.consumers * ROWS == (WIDE_TILE if tiles.order == "wide_query_tiles" else WORK_TILE), tiles
    n_tiles = order.numel()
    # heads of a tile run together, and tiles of a document: what they share of K and V stays in L2
    section = heads_per_section(k, v, n_heads) if schedule.length_class == "very_long" else n_heads
    n_items = n_tiles * n_heads
    programs, counter = programs_of(n_items, q.device, tiles.dynamic)
    spoiled = new_marks(n_heads, total_q, q.device) if schedule.crosses_documents else None
    descs, rest = columns_of_heads((q, ROWS), (k, tiles.block_n), (v, tiles.block_n), (o, ROWS))
    launch(
        _fwd_kernel, (programs,),
        *descs, *rest, lse,
        lse if features.sinks is None else features.sinks, counter, order, schedule.key_start, schedule.key_end,
        spoiled, n_items, n_tiles, n_heads, n_heads // k.shape[1], section, total_q,
        q.stride(1), k.stride(1), v.stride(1), features.softmax_scale, features.softcap,
        HAS_SINKS=features.sinks is not None, HAS_SOFTCAP=features.softcap != 0.0, **tiles.constants(),
        num_warps=4, maxnreg=tiles.registers()[2],
    )  # fmt: skip
    if spoiled is not None:
        repair_forward(q, k, v, o, lse, spoiled, schedule, features)
    return o, lse
