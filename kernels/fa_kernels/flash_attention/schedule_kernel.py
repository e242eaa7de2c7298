"""Computes all tensors of a schedule (schedule.py) in one kernel launch.

schedule.tensors_by_torch computes the same tensors with more than thirty torch operators, and is easier to read. For
short documents, launching thirty operators takes the host longer than attention takes the GPU. Each program of the
kernel computes either the ranges of some tokens, or the positions of some tiles in query_tiles, wide_query_tiles or
key_tiles. A binary search in cu_seqlens finds the document of a token. To find the position of a tile without sorting,
a program counts the tiles that come before this tile. Each program finds the documents of all tiles itself, so programs
do not communicate.

The numbers of documents and tokens are not compile-time constants, so one compiled kernel serves all batches.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div
from fa_kernels.flash_attention.structure import structure
from fa_kernels.launch.record import launch_unspecialised
from fa_kernels.torch_private import may_be_traced

TOKENS = 512  # the number of tokens whose ranges a program computes
TILES = 32  # a program computes the positions of this number of tiles in query_tiles, wide_query_tiles or key_tiles
OTHERS = 256  # a program compares its own tiles with this number of tiles at a time
WARPS = 8  # per program
ALIGNMENT = 32  # each tensor in the common buffer begins at a multiple of ALIGNMENT int32 elements (128 bytes)


@structure
class _RangeInputs:
    """The inputs from which a kernel computes the range of each query, or the range of each key.

    The range of a query contains the keys that the query sees. The range of a key contains the queries that see the
    key. A query sees `left` keys before its aligned key, and `right` keys after its aligned key. If a kernel computes
    the range of each query, `before` is therefore `left`, and `after` is `right`. A key is seen by the `right` queries
    before its aligned query, and by the `left` queries after its aligned query. If a kernel computes the range of each
    key, `before` is therefore `right`, and `after` is `left`.
    """

    own_ptr: tl.tensor  # cu_seqlens of the tokens whose ranges are computed, for example of the queries
    other_ptr: tl.tensor  # cu_seqlens of the tokens that the ranges contain, for example of the keys
    n_edges: tl.tensor  # the number of elements of cu_seqlens
    largest_power: tl.tensor  # the largest power of two that is at most n_edges
    total_own: tl.tensor  # the number of tokens whose ranges are computed
    total_other: tl.tensor  # the number of all keys if the ranges contain keys, else the number of all queries
    before: tl.tensor  # how many tokens before the aligned token are in a range; -1 means all
    after: tl.tensor  # how many tokens after the aligned token are in a range; -1 means all


@structure
class _Ranges:
    """The range of keys that each query sees, or the range of queries that see each key."""

    start: tl.tensor
    end: tl.tensor
    length: tl.tensor  # the number of keys in a query's document, or of queries in a key's document


@triton.jit
def _document_of(tokens, cu_ptr, n_edges, power):
    """Returns each token's document, counted from 1: how many documents begin at or before the token.

    No token gets the number of an empty document. A binary search finds the bits of the document's number, from the
    highest to the lowest.

    n_edges: the number of elements of cu_seqlens. power: the largest power of two that is at most n_edges.
    """
    document = tl.zeros_like(tokens)
    while power > 0:
        further = document + power
        edge = tl.load(cu_ptr + further - 1, mask=further <= n_edges, other=0)
        document = tl.where((further <= n_edges) & (edge <= tokens), further, document)
        power = power // 2
    return document


@triton.jit
def _edge(index, cu_ptr, n_edges, total):
    """Returns element `index` of cu_seqlens. The result is from 0 to `total`, even if cu_seqlens is wrong."""
    edge = tl.load(cu_ptr + tl.minimum(tl.maximum(index, 0), n_edges - 1))
    return tl.minimum(tl.maximum(edge, 0), total)


@triton.jit
def _ranges_of(tokens, inputs):
    """Returns the `_Ranges` of `tokens`, which are queries or keys."""
    n_edges = inputs.n_edges
    document = _document_of(tokens, inputs.own_ptr, n_edges, inputs.largest_power)
    start = _edge(document - 1, inputs.other_ptr, n_edges, inputs.total_other)
    end = _edge(document, inputs.other_ptr, n_edges, inputs.total_other)
    aligned = tokens - _edge(document, inputs.own_ptr, n_edges, inputs.total_own) + end
    first = tl.where(inputs.before < 0, start, tl.minimum(tl.maximum(aligned - inputs.before, start), end))
    past_last = tl.where(inputs.after < 0, end, tl.minimum(tl.maximum(aligned + inputs.after + 1, start), end))
    return _Ranges(first, past_last, end - start)


@triton.jit
def _store_ranges(program, start_ptr, end_ptr, inputs, total, TOKENS: tl.constexpr):
    """Stores the `_Ranges` of `TOKENS` tokens. `total` is the number of all tokens."""
    tokens = program * TOKENS + tl.arange(0, TOKENS)
    ranges = _ranges_of(tokens, inputs)
    tl.store(start_ptr + tokens, ranges.start, mask=tokens < total)
    tl.store(end_ptr + tokens, ranges.end, mask=tokens < total)


@triton.jit
def _length_of(tiles, inputs, total, TILE: tl.constexpr):
    """Returns for each tile the length of its first or its last document, whichever is longer.

    For tiles of queries, the length of a document is its number of keys. For tiles of keys, the length of a document is
    its number of queries.
    """
    first = tiles * TILE
    last = tl.minimum(first + TILE, total) - 1
    return tl.maximum(_ranges_of(first, inputs).length, _ranges_of(last, inputs).length)


@triton.jit
def _store_order(
    program, order_ptr, inputs, total,
    TILE: tl.constexpr, LAST_FIRST: tl.constexpr, TILES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Stores the indices of `TILES` tiles at their positions in the order of schedule.document_by_document."""
    n_tiles = tl.cdiv(total, TILE)
    tiles = program * TILES + tl.arange(0, TILES)
    length = _length_of(tiles, inputs, total, TILE)
    position = tl.zeros_like(tiles)
    for base in range(0, n_tiles, OTHERS):
        others = base + tl.arange(0, OTHERS)
        theirs = _length_of(others, inputs, total, TILE)
        if LAST_FIRST:
            wins_ties = others[None, :] > tiles[:, None]
        else:
            wins_ties = others[None, :] < tiles[:, None]
        longer, equal = theirs[None, :] > length[:, None], theirs[None, :] == length[:, None]
        is_before = (longer | (equal & wins_ties)) & (others < n_tiles)[None, :]  # [TILES, OTHERS]
        position += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(order_ptr + position, tiles, mask=tiles < n_tiles)


@triton.jit
def _aligned(size, ALIGNMENT: tl.constexpr):
    return tl.cdiv(size, ALIGNMENT).to(tl.int64) * ALIGNMENT


@triton.jit(
    do_not_specialize=["n_edges", "largest_power", "total_q", "total_k", "left", "right", "keys_in_order"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def _schedule_kernel(
    out_ptr, cu_q_ptr, cu_k_ptr, n_edges, largest_power, total_q, total_k, left, right, keys_in_order,
    WORK_TILE: tl.constexpr, WIDE_TILE: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, OTHERS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Each program computes a part of the tensors of a schedule.

    Programs compute, in the order of their ids, query_tiles, wide_query_tiles, the ranges of queries, key_tiles and the
    ranges of keys. A launch without gradients has no programs for key_tiles and for the ranges of keys.
    out_ptr: the buffer that holds all tensors, with the layout of `_layout`.
    """
    key_start_ptr = out_ptr
    key_end_ptr = key_start_ptr + _aligned(total_q, ALIGNMENT)
    query_tiles_ptr = key_end_ptr + _aligned(total_q, ALIGNMENT)
    wide_query_tiles_ptr = query_tiles_ptr + _aligned(tl.cdiv(total_q, WORK_TILE), ALIGNMENT)
    query_start_ptr = wide_query_tiles_ptr + _aligned(tl.cdiv(total_q, WIDE_TILE), ALIGNMENT)
    query_end_ptr = query_start_ptr + _aligned(total_k, ALIGNMENT)
    key_tiles_ptr = query_end_ptr + _aligned(total_k, ALIGNMENT)
    # Programs that compute the same tensors have consecutive ids. For example, after_wide is the id of the first
    # program after those that compute wide_query_tiles.
    after_tiles = tl.cdiv(tl.cdiv(total_q, WORK_TILE), TILES)
    after_wide = after_tiles + tl.cdiv(tl.cdiv(total_q, WIDE_TILE), TILES)
    after_queries = after_wide + tl.cdiv(total_q, TOKENS)
    after_key_tiles = after_queries + tl.cdiv(tl.cdiv(total_k, WORK_TILE), TILES)
    queries = _RangeInputs(cu_q_ptr, cu_k_ptr, n_edges, largest_power, total_q, total_k, left, right)
    keys = _RangeInputs(cu_k_ptr, cu_q_ptr, n_edges, largest_power, total_k, total_q, right, left)
    program = tl.program_id(0)
    if program < after_tiles:
        _store_order(program, query_tiles_ptr, queries, total_q, WORK_TILE, True, TILES, OTHERS)
    elif program < after_wide:
        _store_order(program - after_tiles, wide_query_tiles_ptr, queries, total_q, WIDE_TILE, True, TILES, OTHERS)
    elif program < after_queries:
        _store_ranges(program - after_wide, key_start_ptr, key_end_ptr, queries, total_q, TOKENS)
    elif program >= after_key_tiles:
        _store_ranges(program - after_key_tiles, query_start_ptr, query_end_ptr, keys, total_k, TOKENS)
    elif keys_in_order == 0:
        _store_order(program - after_queries, key_tiles_ptr, keys, total_k, WORK_TILE, False, TILES, OTHERS)
    else:
        tiles = (program - after_queries) * TILES + tl.arange(0, TILES)
        tl.store(key_tiles_ptr + tiles, tiles, mask=tiles < tl.cdiv(total_k, WORK_TILE))


class _Layout(NamedTuple):
    """The layout of a schedule's tensors in one int32 buffer, and the number of programs that fill the buffer."""

    size: int  # the size of the buffer in elements
    # The sizes of the parts into which the buffer is split. Part 0 has size 0, and stands for all empty tensors. Each
    # other part of the buffer holds one tensor, or is padding.
    sizes: list[int]
    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # returns the tensors in the order of Schedule's fields
    programs: int


@lru_cache(maxsize=64)
def _layout(total_q: int, total_k: int, work_tile: int, wide_tile: int, gradients: bool) -> _Layout:
    n_query_tiles, n_wide_tiles = ceil_div(total_q, work_tile), ceil_div(total_q, wide_tile)
    programs = ceil_div(n_query_tiles, TILES) + ceil_div(n_wide_tiles, TILES) + ceil_div(total_q, TOKENS)
    of_gradients = [0, 0, 0]
    if gradients:
        n_key_tiles = ceil_div(total_k, work_tile)
        of_gradients = [total_k, total_k, n_key_tiles]
        programs += ceil_div(n_key_tiles, TILES) + ceil_div(total_k, TOKENS)
    sizes = [0]
    places: list[int] = []  # indices into sizes
    for size in (total_q, total_q, n_query_tiles, n_wide_tiles, *of_gradients):
        places.append(len(sizes) if size else 0)
        sizes += [part for part in (size, -size % ALIGNMENT) if part]  # split_with_sizes needs 1 us per part
    key_start, key_end, query_tiles, wide_query_tiles, query_start, query_end, key_tiles = places
    pick = itemgetter(key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles)
    return _Layout(sum(sizes), sizes, pick, programs)


def can_run(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Returns True if the kernel can read cu_seqlens and no tool traces torch operators, else False."""
    if torch.compiler.is_compiling() or may_be_traced():
        return False
    return _is_readable(cu_seqlens_q) and (cu_seqlens_k is cu_seqlens_q or _is_readable(cu_seqlens_k))


def _is_readable(cu_seqlens: Tensor) -> bool:
    return (
        cu_seqlens.is_cuda
        and type(cu_seqlens) is Tensor
        and cu_seqlens.dtype == torch.int32
        and cu_seqlens.is_contiguous()
        and cu_seqlens.get_device() == torch.cuda.current_device()
    )


def schedule_tensors(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    window: tuple[int, int],
    *,
    keys_in_order: bool,
    gradients: bool,
    work_tile: int,
    wide_tile: int,
) -> tuple[Tensor, ...]:
    """Computes the seven tensors of a Schedule, in the order of its fields, as views of one buffer.

    Args:
        cu_seqlens_q, cu_seqlens_k: (n_docs + 1,) int32, contiguous.
        window: (left, right). A query sees its aligned key, `left` keys before the aligned key and `right` keys after
            the aligned key; -1 means all keys on one side.
        keys_in_order: whether key_tiles is in ascending order.
        gradients: whether to compute query_start, query_end and key_tiles, which only backward passes read. If
            gradients is False, query_start, query_end and key_tiles are empty.
        work_tile: the tokens per tile in query_tiles and key_tiles. wide_tile: the tokens per tile in wide_query_tiles.
    """
    layout = _layout(total_q, total_k, work_tile, wide_tile, gradients)
    buffer = cu_seqlens_q.new_empty(layout.size)
    n_edges = cu_seqlens_q.shape[0]
    if layout.programs:
        launch_unspecialised(
            _schedule_kernel, (layout.programs,),
            buffer, cu_seqlens_q, cu_seqlens_k, n_edges, 1 << n_edges.bit_length() - 1, total_q, total_k, *window,
            int(keys_in_order), WORK_TILE=work_tile, WIDE_TILE=wide_tile,
            TOKENS=TOKENS, TILES=TILES, OTHERS=OTHERS, ALIGNMENT=ALIGNMENT, num_warps=WARPS,
        )  # fmt: skip
    return layout.pick(buffer.split_with_sizes(layout.sizes))
