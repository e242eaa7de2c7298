"""Two kernels: the first kernel of each backward pass on Hopper, and the kernel that rounds the sum of dQ.

The fused backward kernel computes dQ in parts, and adds them up in an fp32 tensor in global memory. This tensor is
called the sum of dQ. `prepare` launches a kernel that computes delta from o and do, lays out lse and delta for TMA, and
sets the sum of dQ to 0. `finish` launches a kernel that multiplies the sum of dQ by the softmax scale, rounds the
products to the dtype of q, and stores them as dq.

The sum of dQ consists of blocks of 64 queries and 64 columns of a head. The number of queries is padded to a multiple
of 64. The sum of dQ is stored as a tensor of shape (number of elements / 32, 1, 32). At head_dim 96, the columns of a
head form one block of 64 columns and one block of 32 columns. The blocks are sorted by queries, then by heads, then by
columns. A block is contiguous (16 KiB, or 8 KiB with 32 columns), so one TMA operation can add to the whole block.
Inside a block, elements are in the order in which threads hold them (registers.py).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import LOG2_E, ceil_div
from fa_kernels.flash_attention.delta import delta_of_rows
from fa_kernels.flash_attention.hopper.backward.dq_order import NO_TILE
from fa_kernels.flash_attention.hopper.backward.items import SUM_BLOCK
from fa_kernels.flash_attention.nan_isolation import ROWS_PER_MARK
from fa_kernels.flash_attention.schedule import WORK_TILE
from fa_kernels.launch.record import launch

ROW_ALIGNMENT = 4  # fp32 elements: TMA needs start addresses that are multiples of 16 bytes


@triton.jit(do_not_specialize=["total", "padded", "n_heads"])
def _prepare_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, lse_delta_ptr, delta_ptr, dq_ptr, semaphore_ptr, stride_dot, stride_doh,
    total, padded, n_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program writes lse and delta of `BLOCK` queries of one head to lse_delta_ptr.

    The program also writes to each of dq_ptr, semaphore_ptr and delta_ptr that is not None. The sum of dQ (dq_ptr) is
    set to 0, `WORDS` elements at a time. The semaphores at semaphore_ptr, which order the additions to dQ (see
    dq_order.py), are set to `NO_TILE`. delta_ptr receives delta with the shape (n_heads, total).
    """
    unit, head = tl.program_id(0) // n_heads, (tl.program_id(0) % n_heads).to(tl.int64)
    rows = unit * BLOCK + tl.arange(0, BLOCK)
    inside = rows < total
    if unit * BLOCK < total:  # blocks that hold only padding have no dQ and no semaphores
        if dq_ptr is not None:
            dq_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * HEAD_DIM)
            for word in tl.static_range(0, BLOCK * HEAD_DIM, WORDS):
                tl.store(dq_ptr + word + tl.arange(0, WORDS), tl.zeros([WORDS], tl.float32))
        if semaphore_ptr is not None:
            tl.store(semaphore_ptr + tl.program_id(0), NO_TILE)
    lse = tl.load(lse_ptr + head * total + rows, mask=inside, other=float("-inf"))
    # Rows that see no key, and padding rows, get lse = inf, so that their probabilities 2^(score - inf) are 0.
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    tl.store(lse_delta_ptr + head * padded + rows, lse, mask=rows < padded)
    delta = delta_of_rows(
        o_ptr, do_ptr, dlse_ptr, stride_dot, stride_doh, rows, head, total, n_heads, HEAD_DIM, BLOCK_D
    )
    tl.store(lse_delta_ptr + (n_heads + head) * padded + rows, delta, mask=rows < padded)
    if delta_ptr is not None:
        tl.store(delta_ptr + head * total + rows, delta, mask=inside)


class Needs(NamedTuple):
    """Says which optional tensors of `Prepared` the backward kernels need."""

    delta: bool
    dq_sum: bool
    semaphores: bool


class Prepared(NamedTuple):
    """The tensors that `prepare` creates for the backward kernels. A tensor that the call does not need is None.

    In `lse_delta`, each head has padding after its total_q values. Without padding, the last block of a head would also
    read lse and delta of the next head. A NaN in delta of the next head would then reach dK, because 0 * NaN is NaN.
    """

    lse_delta: Tensor  # (2, n_heads, padded) fp32: lse in log2 units (+inf for rows that see no key), then delta
    delta: Tensor | None  # (n_heads, total_q) fp32: delta as in `lse_delta`, but without padding
    dq_sum: Tensor | None  # fp32 zeros, in the layout that the module docstring describes
    semaphores: Tensor | None  # int32 semaphores, one for each head and block of 64 queries (dq_order.py)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the fields that are not None. If delta is not None, it is the last element."""
        return tuple(x for x in (self.lse_delta, self.dq_sum, self.semaphores, self.delta) if x is not None)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], needs: Needs) -> "Prepared":
        """Rebuilds a Prepared from the result of Prepared.tensors. needs: as for `prepare`."""
        lse_delta, *others = tensors
        delta = others.pop() if needs.delta else None
        dq_sum = others.pop(0) if needs.dq_sum else None
        return cls(lse_delta, delta, dq_sum, others.pop() if needs.semaphores else None)


def prepare(o: Tensor, do: Tensor, dlse: Tensor | None, lse: Tensor, needs: Needs) -> Prepared:
    """Creates the tensors of `Prepared` in one kernel launch.
    needs: which optional tensors the result holds. The result always holds `lse_delta`.

    Shapes: o and do (total_q, n_heads, head_dim), in any dtype; lse and dlse (n_heads, total_q) fp32. o is contiguous,
    and the last dimension of do has stride 1.
    """
    total, n_heads, head_dim = o.shape
    padded = ceil_div(total + WORK_TILE, ROW_ALIGNMENT) * ROW_ALIGNMENT
    n_units = ceil_div(total, SUM_BLOCK) * n_heads
    n_words = SUM_BLOCK * head_dim
    of_fp32 = partial(torch.empty, dtype=torch.float32, device=o.device)
    prepared = Prepared(
        of_fp32(2, n_heads, padded),
        of_fp32(n_heads, total) if needs.delta else None,
        of_fp32(n_units * n_words // 32, 1, 32) if needs.dq_sum else None,
        torch.empty(n_units, dtype=torch.int32, device=o.device) if needs.semaphores else None,
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
    """Multiplies `COLUMNS` columns of the sum of dQ by `scale`, and stores the products in the given rows of dq.

    Returns NaN if a multiplied element is infinite or NaN, else 0.
    """
    sums = tl.load(sum_ptr + tl.arange(0, ROWS * COLUMNS))
    # This permutation inverts registers.in_order_of_threads.
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
    """One program scales and rounds dQ of `BLOCK` queries of a head.

    If marks_ptr is not None, the program also writes the NaN mark of its `BLOCK` queries.
    """
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
    """Returns dq = softmax_scale * dq_sum in the shape and dtype of `like`. dq is contiguous.

    marks: the tensor to which the NaN marks of dq are written (nan_isolation.new_marks), or None.
    Shapes: `like` (total_q, n_heads, head_dim).
    """
    total, n_heads, head_dim = like.shape
    dq = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    launch(
        _finish_kernel, (ceil_div(total, SUM_BLOCK) * n_heads,),
        dq_sum, dq, marks, softmax_scale, total, n_heads, HEAD_DIM=head_dim, BLOCK=SUM_BLOCK, num_warps=8,
    )  # fmt: skip
    return dq
