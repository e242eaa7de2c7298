"""The passes before and after the backward kernels: lse and delta in the form that TMA loads, and the fp32 sum of dQ.

The pass before is one kernel with a program for each 64 rows of a head. It computes delta from o and do, and clears the
same rows of the sum.

The sum of dQ is (n, 1, 32): blocks of 64 queries, in each all heads, and for each head its blocks of 64 columns,
or of the 32 after the first 64, in the order of threads (registers.py). It takes 16 or 8 KiB in a row, so that one TMA
operation adds it.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import LOG2_E, ceil_div
from fa_kernels.flash_attention.delta import delta_of_rows
from fa_kernels.flash_attention.hopper.backward.items import SUM_BLOCK
from fa_kernels.flash_attention.hopper.backward.order import NOBODY
from fa_kernels.flash_attention.nan_isolation import ROWS_PER_MARK
from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.launch.record import launch

ROW_ALIGNMENT = 4  # TMA takes fp32 vectors that begin at a multiple of 16 bytes


@triton.jit(do_not_specialize=["total", "padded", "n_heads"])
def _prepare_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, rows_ptr, delta_ptr, dq_ptr, semaphore_ptr, stride_dot, stride_doh,
    total, padded, n_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program: lse and delta of BLOCK rows of a head.

    Of the other outputs, those that are not None: the sum of dQ is set to 0, WORDS elements at a time, the semaphore to
    NOBODY, and delta is stored once more in the layout of attention_delta.
    """
    unit, head = tl.program_id(0) // n_heads, (tl.program_id(0) % n_heads).to(tl.int64)
    rows = unit * BLOCK + tl.arange(0, BLOCK)
    inside = rows < total
    if unit * BLOCK < total:  # later rows are padding of lse and delta alone
        if dq_ptr is not None:
            dq_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * HEAD_DIM)
            for word in tl.static_range(0, BLOCK * HEAD_DIM, WORDS):
                tl.store(dq_ptr + word + tl.arange(0, WORDS), tl.zeros([WORDS], tl.float32))
        if semaphore_ptr is not None:
            tl.store(semaphore_ptr + tl.program_id(0), NOBODY)
    lse = tl.load(lse_ptr + head * total + rows, mask=inside, other=float("-inf"))
    # 2^(score - inf) is 0: a row that sees no key, or is padding, contributes nothing
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    tl.store(rows_ptr + head * padded + rows, lse, mask=rows < padded)
    delta = delta_of_rows(
        o_ptr, do_ptr, dlse_ptr, stride_dot, stride_doh, rows, head, total, n_heads, HEAD_DIM, BLOCK_D
    )
    tl.store(rows_ptr + (n_heads + head) * padded + rows, delta, mask=rows < padded)
    if delta_ptr is not None:
        tl.store(delta_ptr + head * total + rows, delta, mask=inside)


class Prepared(NamedTuple):
    """What the kernels read besides q, k, v and do. A field that `prepare` was not asked for is None.

    rows (2, n_heads, padded) fp32: lse in units of log2, +inf where a row sees no key, and delta. Each head's total_q
    rows are followed by padding, so that its last block of queries reads no other head's rows: NaN in their delta would
    reach all of dK. delta (n_heads, total_q) fp32: that of attention_delta. dq_sum fp32: zeros. semaphores of order.py,
    int32: for each 64 queries, all heads.
    """

    rows: Tensor
    delta: Tensor | None
    dq_sum: Tensor | None
    semaphores: Tensor | None


def prepare(
    o: Tensor, do: Tensor, dlse: Tensor | None, lse: Tensor, *, sums: bool, ordered: bool, keeps_delta: bool
) -> Prepared:
    """Prepares the backward pass in one launch.

    Shapes: o, do (total_q, n_heads, head_dim), in any dtype; lse, dlse (n_heads, total_q) fp32. o is dense, and do has
    a dense last dimension. sums: dq_sum is wanted, and semaphores too if the sums are `ordered`.
    """
    total, n_heads, head_dim = o.shape
    padded = ceil_div(total + WORK_TILE, ROW_ALIGNMENT) * ROW_ALIGNMENT
    n_units = ceil_div(total, SUM_BLOCK) * n_heads
    n_words = SUM_BLOCK * head_dim
    of_fp32 = partial(torch.empty, dtype=torch.float32, device=o.device)
    prepared = Prepared(
        of_fp32(2, n_heads, padded),
        of_fp32(n_heads, total) if keeps_delta else None,
        of_fp32(n_units * n_words // 32, 1, 32) if sums else None,
        torch.empty(n_units, dtype=torch.int32, device=o.device) if sums and ordered else None,
    )
    launch(
        _prepare_kernel, (ceil_div(padded, SUM_BLOCK) * n_heads,),
        o, do, dlse, lse, *prepared, do.stride(0), do.stride(1), total, padded, n_heads,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK=SUM_BLOCK, WORDS=n_words & -n_words,
    )  # fmt: skip
    return prepared


@triton.jit
def _finish_columns(
    sum_ptr, dq_ptr, rows, column, total, row_stride, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Scales and rounds COLUMNS columns of `rows`. Returns NaN if an element is not finite, else 0."""
    sums = tl.load(sum_ptr + tl.arange(0, ROWS * COLUMNS))
    # the inverse of registers.in_order_of_threads
    sums = tl.permute(tl.reshape(sums, [COLUMNS // 8, ROWS // 16, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    inside = (rows < total)[:, None]
    sums = tl.where(inside, tl.reshape(sums, [ROWS, COLUMNS]), 0.0)
    columns = column + tl.arange(0, COLUMNS)
    dq_ptr += rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(dq_ptr, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    return tl.sum(tl.sum(sums * 0.0, axis=1), axis=0)


@triton.jit(do_not_specialize=["total", "n_heads"])
def _finish_kernel(
    sum_ptr, dq_ptr, marks_ptr, scale, total, n_heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program scales and rounds BLOCK rows of a head, and writes their mark of NaN unless marks_ptr is None."""
    unit, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    rows = unit * BLOCK + tl.arange(0, BLOCK)
    sum_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * HEAD_DIM)
    zero = tl.zeros([], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, BLOCK):
        zero += _finish_columns(
            sum_ptr + BLOCK * column, dq_ptr, rows, head * HEAD_DIM + column, total, n_heads * HEAD_DIM, scale, BLOCK,
            min(BLOCK, HEAD_DIM - column),
        )  # fmt: skip
    if marks_ptr is not None:
        tl.static_assert(BLOCK == ROWS_PER_MARK)
        mark = marks_ptr + head.to(tl.int64) * tl.cdiv(total, BLOCK) + unit
        tl.store(mark, (zero != 0.0).to(tl.int32))


def finish(dq_sum: Tensor, softmax_scale: float, marks: Tensor | None, like: Tensor) -> Tensor:
    """Converts the sum of dS K to dq, dense, in the shape (total_q, n_heads, head_dim) and dtype of `like`.

    marks (nan_isolation.new_marks): NaN in dq.
    """
    total, n_heads, head_dim = like.shape
    dq = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    launch(
        _finish_kernel, (ceil_div(total, SUM_BLOCK) * n_heads,),
        dq_sum, dq, marks, softmax_scale, total, n_heads, HEAD_DIM=head_dim, BLOCK=SUM_BLOCK, num_warps=8,
    )  # fmt: skip
    return dq
