"""The passes before and after the backward kernels: the fp32 accumulator of dQ, and the rows' lse and delta for TMA.

The accumulator is (n, 1, 32): blocks of 64 queries after one another, in each of these all heads, and of a head each 64
columns, or the 32 after the first 64, in the order of threads (threads.py). Those are 16 KiB in a row, or 8, so one TMA
operation adds them, and shared memory takes them in half the cycles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.hopper.bwd_steps import SUM_BLOCK
from kernels.flash_attention.hopper.turns import NOBODY
from kernels.flash_attention.portable.launch import SPOILED_ROWS, ceil_div
from kernels.flash_attention.replay import launch
from kernels.flash_attention.schedule import WORK_TILE

ROW_ALIGNMENT = 4  # TMA takes fp32 vectors that begin at a multiple of 16 bytes


@triton.jit(do_not_specialize=["total", "padded", "n_heads", "n_semaphores"])
def _prepare_kernel(
    lse_ptr, delta_ptr, rows_ptr, dq_ptr, semaphore_ptr, total, padded, n_heads, n_words, n_semaphores,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Program i zeroes block i of dq, and copies block i of lse and delta, of which there are far fewer."""
    program = tl.program_id(0)
    words = program.to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tl.store(dq_ptr + words, tl.zeros([BLOCK_WORDS], tl.float32), mask=words < n_words)
    if semaphore_ptr is not None:  # far fewer
        tl.store(semaphore_ptr + words, tl.full([BLOCK_WORDS], NOBODY, tl.int32), mask=words < n_semaphores)
    row_blocks = tl.cdiv(padded, BLOCK_ROWS)
    if program < row_blocks * n_heads:
        head = (program // row_blocks).to(tl.int64)
        rows = program % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = rows < total
        lse = tl.load(lse_ptr + head * total + rows, mask=inside, other=float("-inf"))
        delta = tl.load(delta_ptr + head * total + rows, mask=inside, other=0.0)
        # 2^(score - inf) is 0: a row that sees nothing, or is none, takes no part
        lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
        tl.store(rows_ptr + head * padded + rows, lse, mask=rows < padded)
        tl.store(rows_ptr + (n_heads + head) * padded + rows, delta, mask=rows < padded)


def prepare(lse: Tensor, delta: Tensor, head_dim: int, ordered: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(n_heads, total_q) fp32 twice -> rows (2, n_heads, padded), zeros for the sum of dQ, fp32, and semaphores.

    rows[0] is lse in units of log2, +inf where a row sees no key; rows[1] is delta. A head's total_q are followed by
    rows that take no part, as many as the longest block of queries of a kernel has, so that its last block reads no
    other head's: P is 0 there, but times NaN in that head's delta it would be NaN in dS, and so in all of dK.
    Semaphores of turns.py, int32, of each 64 queries all heads, if sums are ordered, else None.
    """
    n_heads, total = lse.shape
    padded = _padded(total)
    rows = torch.empty(2, n_heads, padded, dtype=torch.float32, device=lse.device)
    n_units = ceil_div(total, SUM_BLOCK) * n_heads
    n_sums = n_units * SUM_BLOCK * head_dim
    semaphores = torch.empty(n_units, dtype=torch.int32, device=lse.device) if ordered else None
    dq = torch.empty(n_sums // 32, 1, 32, dtype=torch.float32, device=lse.device)
    block_rows, block_words = 1024, 4096
    grid = max(ceil_div(dq.numel(), block_words), ceil_div(padded, block_rows) * n_heads)
    launch(
        _prepare_kernel, (grid,),
        lse, delta, rows, dq, semaphores, total, padded, n_heads, dq.numel(), n_units, BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
    )  # fmt: skip
    return rows, dq, semaphores


def _padded(total: int) -> int:
    return ceil_div(total + WORK_TILE, ROW_ALIGNMENT) * ROW_ALIGNMENT


def prepare_rows(lse: Tensor, delta: Tensor) -> Tensor:
    """(n_heads, total_q) fp32 twice -> `prepare`'s rows, where there is no dq to sum."""
    n_heads, total = lse.shape
    padded = _padded(total)
    rows = torch.empty(2, n_heads, padded, dtype=torch.float32, device=lse.device)
    block_rows = 1024
    launch(
        _prepare_kernel, (ceil_div(padded, block_rows) * n_heads,),
        lse, delta, rows, rows, None, total, padded, n_heads, 0, 0,  # there is no sum of dQ to clear
        BLOCK_ROWS=block_rows, BLOCK_WORDS=4096,
    )  # fmt: skip
    return rows


@triton.jit
def _finish_columns(
    sum_ptr, dq_ptr, rows, column, total, row_stride, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Scales and rounds COLUMNS columns of `rows`; NaN where one of them is not finite, else 0."""
    sums = tl.load(sum_ptr + tl.arange(0, ROWS * COLUMNS))
    # back from the order of threads.in_order_of_threads
    sums = tl.permute(tl.reshape(sums, [COLUMNS // 8, ROWS // 16, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    inside = (rows < total)[:, None]
    sums = tl.where(inside, tl.reshape(sums, [ROWS, COLUMNS]), 0.0)
    columns = column + tl.arange(0, COLUMNS)
    dq_ptr += rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(dq_ptr, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    return tl.sum(tl.sum(sums * 0.0, axis=1), axis=0)


@triton.jit(do_not_specialize=["total", "n_heads"])
def _finish_kernel(
    sum_ptr, dq_ptr, spoiled_ptr, scale, total, n_heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program scales and rounds BLOCK rows of a head, and sets their mark of NaN unless spoiled is None."""
    unit, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    rows = unit * BLOCK + tl.arange(0, BLOCK)
    sum_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * HEAD_DIM)
    zero = tl.zeros([], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, BLOCK):
        zero += _finish_columns(
            sum_ptr + BLOCK * column, dq_ptr, rows, head * HEAD_DIM + column, total, n_heads * HEAD_DIM, scale, BLOCK,
            min(BLOCK, HEAD_DIM - column),
        )  # fmt: skip
    if spoiled_ptr is not None:
        tl.static_assert(BLOCK == SPOILED_ROWS)
        mark = spoiled_ptr + head.to(tl.int64) * tl.cdiv(total, BLOCK) + unit
        tl.store(mark, (zero != 0.0).to(tl.int32))


def finish(dq_sum: Tensor, softmax_scale: float, spoiled: Tensor | None, like: Tensor) -> Tensor:
    """`prepare`'s sum of dS K -> dq, dense, in the shape (total_q, n_heads, head_dim) and dtype of `like`.

    spoiled (portable.launch.new_marks) gets the marks of NaN in dq.
    """
    total, n_heads, head_dim = like.shape
    dq = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    launch(
        _finish_kernel, (ceil_div(total, SUM_BLOCK) * n_heads,),
        dq_sum, dq, spoiled, softmax_scale, total, n_heads, HEAD_DIM=head_dim, BLOCK=SUM_BLOCK, num_warps=8,
    )  # fmt: skip
    return dq
