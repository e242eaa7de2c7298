"""The passes before and after the backward kernel: the fp32 accumulator of dQ, and the rows' lse and delta for TMA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_attention.portable.launch import SPOILED_ROWS, ceil_div
from kernels.flash_attention.replay import launch
from kernels.flash_attention.schedule import WORK_TILE

ROW_ALIGNMENT = 4  # TMA takes fp32 vectors that begin at a multiple of 16 bytes


@triton.jit(do_not_specialize=["total", "padded", "n_heads"])
def _prepare_kernel(
    lse_ptr, delta_ptr, rows_ptr, dq_ptr, total, padded, n_heads, n_words,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Program i zeroes block i of dq, and copies block i of lse and delta, of which there are far fewer."""
    program = tl.program_id(0)
    words = program.to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tl.store(dq_ptr + words, tl.zeros([BLOCK_WORDS], tl.float32), mask=words < n_words)
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


def prepare(lse: Tensor, delta: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """(n_heads, total_q) fp32 twice -> rows (2, n_heads, padded), dq (total_q, n_heads * head_dim) of zeros, fp32.

    rows[0] is lse in units of log2, +inf where a row sees no key; rows[1] is delta. A head's total_q are followed by
    rows that take no part, as many as the longest block of queries of a kernel has, so that its last block reads no
    other head's: P is 0 there, but times NaN in that head's delta it would be NaN in dS, and so in all of dK.
    """
    n_heads, total = lse.shape
    padded = _padded(total)
    rows = torch.empty(2, n_heads, padded, dtype=torch.float32, device=lse.device)
    dq = torch.empty(total, n_heads * head_dim, dtype=torch.float32, device=lse.device)
    block_rows, block_words = 1024, 4096
    grid = max(ceil_div(dq.numel(), block_words), ceil_div(padded, block_rows) * n_heads)
    launch(
        _prepare_kernel, (grid,),
        lse, delta, rows, dq, total, padded, n_heads, dq.numel(), BLOCK_ROWS=block_rows, BLOCK_WORDS=block_words,
    )  # fmt: skip
    return rows, dq


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
        lse, delta, rows, rows, total, padded, n_heads, 0,  # 0: there is no sum of dQ to clear
        BLOCK_ROWS=block_rows, BLOCK_WORDS=4096,
    )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["total", "n_heads"])
def _finish_kernel(
    sum_ptr, dq_ptr, spoiled_ptr, scale, total, n_heads, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program scales and rounds the rows of a mark, and sets it unless spoiled is None.

    COLUMNS is the power of two that is HEAD_DIM at least.
    """
    unit, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    rows = unit * SPOILED_ROWS + tl.arange(0, SPOILED_ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < total) & (columns < HEAD_DIM)
    words = rows.to(tl.int64) * (n_heads * HEAD_DIM) + head * HEAD_DIM + columns
    sums = tl.load(sum_ptr + words, mask=inside, other=0.0)
    tl.store(dq_ptr + words, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    if spoiled_ptr is not None:
        zeros = sums * 0.0  # NaN where they are not finite
        spoiled = tl.sum(tl.sum(zeros, axis=1), axis=0) != 0.0
        tl.store(spoiled_ptr + head.to(tl.int64) * tl.cdiv(total, SPOILED_ROWS) + unit, spoiled.to(tl.int32))


def finish(dq_sum: Tensor, softmax_scale: float, spoiled: Tensor | None, like: Tensor) -> Tensor:
    """The sum of dS K in fp32 -> dq, dense, in the shape (total_q, n_heads, head_dim) and dtype of `like`.

    spoiled (portable.launch.new_marks) gets the marks of NaN in dq.
    """
    total, n_heads, head_dim = like.shape
    dq = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    launch(
        _finish_kernel, (ceil_div(total, SPOILED_ROWS.value) * n_heads,),
        dq_sum, dq, spoiled, softmax_scale, total, n_heads,
        HEAD_DIM=head_dim, COLUMNS=triton.next_power_of_2(head_dim), num_warps=8,
    )  # fmt: skip
    return dq
