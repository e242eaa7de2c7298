"""Copies and adds rows of one or two tensors by index, so that context parallelism can exchange keys and values.

Tensors have the shape (rows, heads, head_dim), and each row is contiguous. The kernels need one pass over the data.
torch's functions would need several passes: index_select and index_copy_ process one tensor at a time, and sums in fp32
need fp32 copies. On a CPU, this module uses torch's functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div
from fa_kernels.launch.record import ALIGNMENT, launch_unspecialised
from fa_kernels.options import OPTIONS

ELEMENTS = 4096  # elements per program; in 16-bit dtypes, each of the 128 threads moves 4 x 16 bytes
MAX_COLS = 1024


@triton.jit
def _copy_tile(sources, targets, inside, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Copies rows of `WIDTH` elements. sources, targets: [ROWS] pointers to rows. inside: [ROWS] bool."""
    for first in tl.static_range(0, WIDTH, COLS):
        cols = first + tl.arange(0, COLS)
        mask = inside[:, None] & (cols < WIDTH)
        tl.store(targets[:, None] + cols, tl.load(sources[:, None] + cols, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _copy_kernel(
    source_a, source_b, target_a, target_b, from_ptr, to_ptr, n_rows, SOURCE_STRIDE_A: tl.constexpr,
    SOURCE_STRIDE_B: tl.constexpr, TARGET_STRIDE_A: tl.constexpr, TARGET_STRIDE_B: tl.constexpr, WIDTH_A: tl.constexpr,
    WIDTH_B: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program copies `ROWS` rows, from source_a to target_a or from source_b to target_b.

    FROM: whether from_ptr holds the indices of the rows to read. TO: whether to_ptr holds the indices of the rows to
    write.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    source_row, target_row = row.to(tl.int64), row.to(tl.int64)
    if FROM:
        source_row = tl.load(from_ptr + row, mask=inside, other=0).to(tl.int64)
    if TO:
        target_row = tl.load(to_ptr + row, mask=inside, other=0).to(tl.int64)
    if tl.program_id(1) == 0:
        sources, targets = source_a + source_row * SOURCE_STRIDE_A, target_a + target_row * TARGET_STRIDE_A
        _copy_tile(sources, targets, inside, WIDTH_A, COLS)
    else:
        sources, targets = source_b + source_row * SOURCE_STRIDE_B, target_b + target_row * TARGET_STRIDE_B
        _copy_tile(sources, targets, inside, WIDTH_B, COLS)


@triton.jit
def _add_tile(
    totals, added_ptr, ADDED_STRIDE: tl.constexpr, entry_ptrs, count, inside, WIDTH: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Adds rows of the tensor at `added_ptr` to each row of a tile. The sums are computed in fp32.

    totals: [ROWS] pointers to the first element of each row of the tile. entry_ptrs: [ROWS] pointers; entry_ptrs[i]
    points to the indices of the rows that are added to row i of the tile. count: [ROWS], the number of rows that are
    added to each row of the tile. inside: [ROWS] bool, whether a row of the tile exists.
    """
    for first in tl.static_range(0, WIDTH, COLS):
        cols = first + tl.arange(0, COLS)
        mask = inside[:, None] & (cols < WIDTH)
        total = tl.load(totals[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        for i in range(tl.max(count, axis=0)):
            there = inside & (i < count)
            entry = tl.load(entry_ptrs + i, mask=there, other=0).to(tl.int64)
            row_mask = there[:, None] & (cols < WIDTH)
            total += tl.load(added_ptr + entry[:, None] * ADDED_STRIDE + cols, mask=row_mask, other=0.0).to(tl.float32)
        tl.store(totals[:, None] + cols, total, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _add_kernel(
    total_a, total_b, added_a, added_b, rows_ptr, entries_ptr, offsets_ptr, n_rows, TOTAL_STRIDE_A: tl.constexpr,
    TOTAL_STRIDE_B: tl.constexpr, ADDED_STRIDE_A: tl.constexpr, ADDED_STRIDE_B: tl.constexpr, WIDTH_A: tl.constexpr,
    WIDTH_B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program updates `ROWS` rows of one tensor, which starts at `total_a` or at `total_b`. See add_rows."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < n_rows
    row = tl.load(rows_ptr + index, mask=inside, other=0).to(tl.int64)
    start = tl.load(offsets_ptr + index, mask=inside, other=0)
    count = tl.load(offsets_ptr + index + 1, mask=inside, other=0) - start
    entries = entries_ptr + start
    if tl.program_id(1) == 0:
        _add_tile(total_a + row * TOTAL_STRIDE_A, added_a, ADDED_STRIDE_A, entries, count, inside, WIDTH_A, COLS)
    else:
        _add_tile(total_b + row * TOTAL_STRIDE_B, added_b, ADDED_STRIDE_B, entries, count, inside, WIDTH_B, COLS)


def copy_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], from_rows: Tensor | None = None, to_rows: Tensor | None = None
) -> None:
    """Copies rows: for each i and each pair of a source and a target, target[to_rows[i]] = source[from_rows[i]].

    sources, targets: one or two tensors each, (rows, heads, head_dim). The heads of each row of a target must be
    contiguous. from_rows, to_rows: (n,) int32, or None for the rows 0, 1, 2 and so on. If from_rows and to_rows are
    None, all rows of the sources are copied.
    Raises: ValueError if the heads of a target's row are not contiguous.
    """
    sources = [_with_contiguous_rows(source) for source in sources]
    _require_contiguous_rows(targets)
    rows = to_rows if from_rows is None else from_rows
    n_rows = (sources[0] if rows is None else rows).shape[0]
    if not n_rows:
        return
    copy = _copy_in_kernel if sources[0].is_cuda else _copy_plainly
    copy(sources, targets, from_rows, to_rows, n_rows)


def add_rows(totals: Sequence[Tensor], added: Sequence[Tensor], rows: Tensor, entries: Tensor, offsets: Tensor) -> None:
    """Adds rows of `added` to rows of `totals`, by index.

    For each i, adds added[j] to totals[rows[i]], for all j in entries[offsets[i] : offsets[i + 1]]. The sum is computed
    in fp32, in the order of the entries, and rounded once. For example, rows = [4, 7], offsets = [0, 2, 3] and
    entries = [0, 5, 1] add added[0] + added[5] to totals[4], and added[1] to totals[7].
    totals, added: one or two tensors each, (rows, heads, head_dim). The heads of each row of `totals` must be
    contiguous.
    rows: (n,) int32, without duplicates. entries: int32, indices of rows of `added`. offsets: (n + 1,) int32.
    Raises: ValueError if the heads of a row of `totals` are not contiguous.
    """
    added = [_with_contiguous_rows(x) for x in added]
    _require_contiguous_rows(totals)
    if not rows.shape[0]:
        return
    add = _add_in_kernel if totals[0].is_cuda else _add_plainly
    add(totals, added, rows, entries, offsets)


def _copy_in_kernel(
    sources: Sequence[Tensor], targets: Sequence[Tensor], from_rows: Tensor | None, to_rows: Tensor | None, n_rows: int
) -> None:
    unread = targets[0]  # the kernel needs a pointer argument even if it reads no indices
    rows = unread if from_rows is None else from_rows, unread if to_rows is None else to_rows
    (width_a, width_b), cols, grid = _launch_sizes(targets, n_rows)
    (source_a, source_b), (target_a, target_b) = _strides(sources), _strides(targets)
    _launch(
        _copy_kernel, grid, *_pair(sources), *_pair(targets), *rows, n_rows, SOURCE_STRIDE_A=source_a,
        SOURCE_STRIDE_B=source_b, TARGET_STRIDE_A=target_a, TARGET_STRIDE_B=target_b, WIDTH_A=width_a, WIDTH_B=width_b,
        FROM=from_rows is not None, TO=to_rows is not None, ROWS=ELEMENTS // cols, COLS=cols,
    )  # fmt: skip


def _add_in_kernel(
    totals: Sequence[Tensor], added: Sequence[Tensor], rows: Tensor, entries: Tensor, offsets: Tensor
) -> None:
    (width_a, width_b), cols, grid = _launch_sizes(totals, rows.shape[0])
    (total_a, total_b), (added_a, added_b) = _strides(totals), _strides(added)
    _launch(
        _add_kernel, grid, *_pair(totals), *_pair(added), rows, entries, offsets, rows.shape[0], TOTAL_STRIDE_A=total_a,
        TOTAL_STRIDE_B=total_b, ADDED_STRIDE_A=added_a, ADDED_STRIDE_B=added_b, WIDTH_A=width_a, WIDTH_B=width_b,
        ROWS=ELEMENTS // cols, COLS=cols,
    )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel. If all addresses are aligned, the launch takes less host time than Triton's own launch."""
    with torch.cuda.device_of(arguments[0]):  # Triton launches kernels on the current device
        if any(x.data_ptr() % ALIGNMENT for x in arguments if isinstance(x, Tensor)):
            kernel[grid](*arguments, **constants, **OPTIONS)
        else:
            launch_unspecialised(kernel, grid, *arguments, **constants)


def _copy_plainly(
    sources: Sequence[Tensor], targets: Sequence[Tensor], from_rows: Tensor | None, to_rows: Tensor | None, n_rows: int
) -> None:
    """Computes copy_rows with torch, for the CPU."""
    for source, target in zip(sources, targets, strict=True):
        values = source[:n_rows] if from_rows is None else source.index_select(0, from_rows)
        target[slice(n_rows) if to_rows is None else to_rows.long()] = values


def _add_plainly(
    totals: Sequence[Tensor], added: Sequence[Tensor], rows: Tensor, entries: Tensor, offsets: Tensor
) -> None:
    """Computes add_rows with torch, for the CPU."""
    counts = offsets.diff().long()
    index = torch.repeat_interleave(torch.arange(len(rows)), counts)
    for total, x in zip(totals, added, strict=True):
        sums = total.index_select(0, rows).float()
        sums.index_add_(0, index, x.index_select(0, entries[: len(index)]).float())
        total[rows.long()] = sums.to(total.dtype)


def _has_contiguous_rows(x: Tensor) -> bool:
    """Returns whether the heads of a row are contiguous, in less host time than `x[0].is_contiguous()`."""
    return x.stride()[1:] == (x.shape[2], 1)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if _has_contiguous_rows(x) else x.contiguous()


def _require_contiguous_rows(targets: Sequence[Tensor]) -> None:
    for target in targets:
        if not _has_contiguous_rows(target):
            raise ValueError(f"the heads of a row must be contiguous; got strides {target.stride()}")


def _launch_sizes(targets: Sequence[Tensor], n_rows: int) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Returns the number of elements in a row of each tensor, the number of columns of a tile, and the launch grid.

    triton.next_power_of_2 is not used, because it takes more host time.
    """
    (_, heads_a, dim_a), (_, heads_b, dim_b) = targets[0].shape, targets[-1].shape
    widths = heads_a * dim_a, heads_b * dim_b
    cols = min(2 ** (max(widths) - 1).bit_length(), MAX_COLS)
    return widths, cols, (ceil_div(n_rows, ELEMENTS // cols), len(targets))


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[-1]


def _strides(tensors: Sequence[Tensor]) -> tuple[int, int]:
    return tensors[0].stride(0), tensors[-1].stride(0)
