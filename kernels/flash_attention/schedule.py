"""Which keys each query sees, and in what order tiles are worked: built once a batch, shared by all layers.

Documents, causality and windows all leave a query one contiguous range of keys, and both ends of that range never
move backwards from one query to the next. So the whole mask of a batch is two integers a token, every tile of
queries reads one contiguous range of keys, and only the blocks at the two ends of it need masking.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WORK_TILE = 128  # tokens: the unit in which work is ordered; every kernel's block of rows divides it but the next one
WIDE_TILE = 192  # tokens: the tile of Hopper's forward pass at head_dim 64
# Keys that a query may see, on average, below which tiles of keys keep the order of the stream: those that run together
# then share queries in L2, which short documents need more than a fair end (on an H200, head_dim 128, documents of 64
# to 512 tokens: 148 TFLOP/s of the backward instead of 130; at 2048 tokens the longest first are faster by 3%).
SHORT_DOCUMENT = 1024
# Keys that a query may see, on average, from which on Hopper's forward pass takes the kernels for long documents.
# Measured are 16384, where those are faster, and 2048, where they are slower (hopper/fwd.py tells by how much).
LONG_DOCUMENT = 8192


class Schedule(NamedTuple):
    """The visible ranges of one packed batch, in global token indices, int32, on the device of q, k and v.

    Shapes: key_start, key_end (total_q,); query_start, query_end (total_k,); query_tiles (ceil(total_q / 128),) and
    key_tiles (ceil(total_k / 128),), tiles of 128 tokens from the most work to the least, key_tiles of SHORT_DOCUMENTs
    in the order of the stream; wide_query_tiles (ceil(total_q / 192),), tiles of 192 tokens from the most to the least.
    Query i sees key j if and only if key_start[i] <= j < key_end[i], which is query_start[j] <= i < query_end[j].
    """

    key_start: Tensor
    key_end: Tensor
    query_start: Tensor
    query_end: Tensor
    query_tiles: Tensor
    key_tiles: Tensor
    wide_query_tiles: Tensor
    long_documents: bool  # as far as shapes tell, for a choice of kernels that waits for nothing
    several_documents: bool  # as far as shapes tell; Hopper's kernels then keep NaN from leaving one within a tile
    one_document: bool  # known without looking at the GPU to be one causal document: scaled_dot_product's is_causal

    def tensors(self) -> list[Tensor]:
        """What an operator can take: the seven tensors, in order."""
        return [*self[:7]]

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], several_documents: bool, long_documents: bool = False
    ) -> "Schedule":
        """The inverse of `tensors`; nothing but the forward pass asks for long_documents."""
        key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = tensors
        ranges = key_start, key_end, query_start, query_end
        orders = query_tiles, key_tiles, wide_query_tiles
        return cls(*ranges, *orders, long_documents, several_documents, one_document=False)


def build_schedule(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Schedule:
    """The schedule of packed queries and keys; runs on the GPU without a sync.

    Shapes: cu_seqlens_q, cu_seqlens_k (n_docs + 1,) int32, both with the same number of documents; tokens past
    their last entry see nothing and are seen by nothing.
    Units: window_size in tokens (left, right) beside the query itself, -1 unbounded; causal means right = 0.
    A document's last query stands beside its last key (flash-attn's bottom-right alignment).
    """
    left, right = window_size
    if causal:
        right = 0
    # wrong ones may give wrong results, but never ranges outside of q, k and v
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.clamp(0, total_q), cu_seqlens_k.clamp(0, total_k)
    key_start, key_end = _visible_ranges(cu_seqlens_q, cu_seqlens_k, total_q, before=left, after=right)
    query_start, query_end = _visible_ranges(cu_seqlens_k, cu_seqlens_q, total_k, before=right, after=left)
    in_sight = _keys_in_sight(cu_seqlens_k, total_k, left, right)
    if in_sight < SHORT_DOCUMENT:
        key_tiles = torch.arange(-(-total_k // WORK_TILE), dtype=torch.int32, device=cu_seqlens_k.device)
    else:
        key_tiles = longest_first(query_start, query_end)
    return Schedule(
        key_start,
        key_end,
        query_start,
        query_end,
        query_tiles=longest_first(key_start, key_end),
        key_tiles=key_tiles,
        wide_query_tiles=longest_first(key_start, key_end, tile=WIDE_TILE),
        long_documents=in_sight >= LONG_DOCUMENT,
        several_documents=cu_seqlens_k.numel() > 2,
        one_document=False,
    )


def causal_schedule(cu_seqlens: Tensor | None, total: int, device: torch.device) -> Schedule:
    """The schedule of causal self-attention over a packed stream of `total` tokens; None is one document."""
    documents = torch.tensor([0, total], dtype=torch.int32, device=device) if cu_seqlens is None else cu_seqlens
    schedule = build_schedule(documents, documents, total, total, causal=True)
    return schedule._replace(one_document=cu_seqlens is None)


def alignment(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int) -> tuple[Tensor, Tensor]:
    """(total_q,) int32 twice: the key that each query stands beside, and its document; ALiBi needs both."""
    token, document = _documents(cu_seqlens_q, total_q)
    beside = token - _with_empty_tail(cu_seqlens_q)[document + 1] + _with_empty_tail(cu_seqlens_k)[document + 1]
    n_docs = cu_seqlens_q.numel() - 1
    return beside.to(torch.int32), document.clamp(max=max(0, n_docs - 1)).to(torch.int32)


def _documents(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Every token's index and document; past the last document comes one more, which is empty."""
    token = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    # how many documents begin at or before the token, less its own; zero-length ones are stepped over
    return token, torch.searchsorted(cu_seqlens, token, right=True) - 1


def _visible_ranges(cu_own: Tensor, cu_other: Tensor, total: int, *, before: int, after: int) -> tuple[Tensor, Tensor]:
    """For each of `total` tokens, the range of the other side's tokens it is paired with."""
    token, document = _documents(cu_own, total)
    own_end = _with_empty_tail(cu_own)[document + 1]
    other_cu = _with_empty_tail(cu_other)
    other_start, other_end = other_cu[document], other_cu[document + 1]
    beside = token - own_end + other_end  # bottom-right alignment
    start = other_start if before < 0 else torch.clamp(beside - before, other_start, other_end)
    end = other_end if after < 0 else torch.clamp(beside + after + 1, other_start, other_end)
    return start.to(torch.int32), end.to(torch.int32)


def _with_empty_tail(cu_seqlens: Tensor) -> Tensor:
    """The ends of all documents and of the empty one behind them."""
    return torch.cat([cu_seqlens, cu_seqlens[-1:]])


def _keys_in_sight(cu_seqlens_k: Tensor, total_k: int, left: int, right: int) -> int:
    """How many keys a query may see on average, by shapes alone: padded cu_seqlens count as shorter documents."""
    mean_length = total_k // max(1, cu_seqlens_k.numel() - 1)
    return mean_length if left < 0 or right < 0 else min(mean_length, left + right + 1)


def longest_first(start: Tensor, end: Tensor, tile: int = WORK_TILE) -> Tensor:
    """Tiles of `tile` tokens by falling length of the range that they must read; those of one length stay in order."""
    last = torch.arange(tile - 1, start.numel() + tile - 1, tile, device=start.device)
    work = end[last.clamp(max=start.numel() - 1)] - start[::tile]
    return torch.argsort(work, descending=True, stable=True).to(torch.int32)
