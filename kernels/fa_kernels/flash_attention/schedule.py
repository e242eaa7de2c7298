"""Which keys each query sees, and in what order tiles are worked: built once a batch, shared by all layers.

Documents, causality and windows all leave a query one contiguous range of keys, and both ends of that range never
move backwards from one query to the next. So the whole mask of a batch is two integers a token, every tile of
queries reads one contiguous range of keys, and only the blocks at the two ends of it need masking.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa_kernels.torch_private import current_stream_address, may_have_dispatch_mode

WORK_TILE = 128  # tokens: the unit in which work is ordered; every kernel's block of rows divides it but the next one
WIDE_TILE = 192  # tokens: a tile of Hopper's forward pass at head_dim 64 and 96
# Keys that a query may see up to which Hopper's forward pass takes the kernels for short documents. Of fewer on average
# tiles of keys keep the order of the stream: those that run together then share queries in L2, which short documents
# need more than a fair end (on an H200, head_dim 128, documents of 64 to 512 tokens: 148 TFLOP/s of the backward
# instead of 130; at 2048 tokens the longest first are faster by 3%).
SHORT_DOCUMENT = 512
# The same from which on it takes those for long documents. On an H200, head_dim 64, those of 2026-11-21 gave 417
# TFLOP/s at 4096, the others 401; those of today give 359 and 395 at 2048, at 96 405 and 462, and at 16384 608 and 580.
LONG_DOCUMENT = 4096
# The same from which on it works few heads at once: 32768 tokens are as fast with all, at 131072 they were slower by 3
# to 5%. At head_dim 128 its warpgroups then take no turns either.
VERY_LONG_DOCUMENT = 2**16
# Queries and keys of a dense call up to which its schedule is kept for the next one: 8 bytes each, so at most 8 times
# 2 MiB. To build one takes an H200's host 485 us; a call of more tokens hides that behind its own work.
KEPT_TOKENS = 2**18
KEPT_SCHEDULES = 8

LengthClass = Literal["short", "medium", "long", "very_long"]


class Schedule(NamedTuple):
    """The visible ranges of one packed batch, in global token indices, int32, on the device of q, k and v.

    Shapes: key_start, key_end (total_q,); query_start, query_end (total_k,); query_tiles (ceil(total_q / 128),), tiles
    of 128 tokens document by document, the longest first; wide_query_tiles (ceil(total_q / 192),), the same of 192;
    key_tiles (ceil(total_k / 128),), from the most work to the least or, of SHORT_DOCUMENTs, in the order of the
    stream.
    Query i sees key j if and only if key_start[i] <= j < key_end[i], which is query_start[j] <= i < query_end[j].
    """

    key_start: Tensor
    key_end: Tensor
    query_start: Tensor
    query_end: Tensor
    query_tiles: Tensor
    key_tiles: Tensor
    wide_query_tiles: Tensor
    length_class: LengthClass  # as far as the host knows, for a choice of kernels that waits for nothing
    # whether tokens may not see each other for another reason than their order, as far as shapes tell: of several
    # documents, or behind the last. Hopper's kernels then keep NaN from leaving one within a tile
    crosses_documents: bool
    is_one_causal_document: bool  # known on the host: scaled_dot_product_attention may take is_causal

    def tensors(self) -> list[Tensor]:
        """What an operator can take: the seven tensors, in order."""
        return [*self[:7]]

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], crosses_documents: bool, length_class: LengthClass = "medium"
    ) -> "Schedule":
        """The inverse of `tensors`; nothing but the forward pass asks for `length_class`."""
        key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = tensors
        ranges = key_start, key_end, query_start, query_end
        orders = query_tiles, key_tiles, wide_query_tiles
        return cls(*ranges, *orders, length_class, crosses_documents, is_one_causal_document=False)


_KEPT: dict[Hashable, Schedule] = {}  # by `_key_of`


def build_schedule(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    padded: bool = True,
    seqlen: int | None = None,
) -> Schedule:
    """The schedule of packed queries and keys; runs on the GPU without a sync.

    Shapes: cu_seqlens_q, cu_seqlens_k (n_docs + 1,) int32, both with the same number of documents; tokens past
    their last entry see nothing and are seen by nothing; padded is False if it is known that there are none.
    Units: window_size in tokens (left, right) beside the query itself, -1 unbounded; causal means right = 0. seqlen is,
    for a choice of kernels, that of the documents where it is known, in keys; as if all were alike where it is None.
    A document's last query stands beside its last key (flash-attn's bottom-right alignment).
    """
    left, right = window_size
    if causal:
        right = 0
    crosses_documents = padded or cu_seqlens_k.numel() > 2
    mean = total_k // max(1, cu_seqlens_k.numel() - 1)  # padded cu_seqlens count as shorter documents
    # wrong ones may give wrong results, but never ranges outside of q, k and v
    queries = _Side.of(cu_seqlens_q.clamp(0, total_q), total_q)
    keys = queries
    if cu_seqlens_k is not cu_seqlens_q or total_k != total_q:
        keys = _Side.of(cu_seqlens_k.clamp(0, total_k), total_k)
    keys_of_queries = _paired(queries, keys)
    queries_of_keys = keys_of_queries if keys is queries else _paired(keys, queries)
    key_start, key_end = _visible_ranges(*keys_of_queries, before=left, after=right)
    query_start, query_end = _visible_ranges(*queries_of_keys, before=right, after=left)
    if _in_sight(mean, left, right) < SHORT_DOCUMENT:
        key_tiles = torch.arange(-(-total_k // WORK_TILE), dtype=torch.int32, device=cu_seqlens_k.device)
    else:
        key_tiles = longest_first(query_start, query_end)
    document_start, document_end, _ = keys_of_queries
    length = document_end - document_start
    return Schedule(
        key_start,
        key_end,
        query_start,
        query_end,
        query_tiles=document_by_document(length, WORK_TILE),
        key_tiles=key_tiles,
        wide_query_tiles=document_by_document(length, WIDE_TILE),
        length_class=length_class_of(_in_sight(mean if seqlen is None else seqlen, left, right)),
        crosses_documents=crosses_documents,
        is_one_causal_document=False,
    )


def causal_schedule(cu_seqlens: Tensor | None, total: int, device: torch.device, seqlen: int | None = None) -> Schedule:
    """The schedule of causal self-attention over a packed stream of `total` tokens; None is one document."""
    if cu_seqlens is None:
        return dense_schedule(1, total, total, device, causal=True)._replace(is_one_causal_document=True)
    return build_schedule(cu_seqlens, cu_seqlens, total, total, causal=True, seqlen=seqlen)


def dense_schedule(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Schedule:
    """build_schedule for `batch` documents of one length, which fill q and k; the last ones built are kept."""
    window_size = (window_size[0], window_size[1])
    arguments = batch, seqlen_q, seqlen_k, device, causal, window_size
    key = _key_of(*arguments)
    if key is None:
        return _dense_schedule(*arguments)
    schedule = _KEPT.get(key)
    if schedule is None:
        with torch.inference_mode(False):  # what is made in inference mode could not be saved for a backward pass
            schedule = _dense_schedule(*arguments)
        if len(_KEPT) >= KEPT_SCHEDULES:
            oldest, *_ = _KEPT
            _KEPT.pop(oldest, None)  # unless another thread has
        _KEPT[key] = schedule
    return schedule


def kept_schedule(
    batch: int, seqlen_q: int, seqlen_k: int, q: Tensor, causal: bool, window_size: tuple[int, int]
) -> Schedule | None:
    """dense_schedule's on q's device if it is at hand, so that nothing need be built."""
    device = q.get_device() if q.is_cuda else q.device  # in a tenth of the time that the name of a device takes
    key = _key_of(batch, seqlen_q, seqlen_k, device, causal, window_size)
    return None if key is None else _KEPT.get(key)


def _key_of(
    batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | int, causal: bool, window_size: tuple[int, int]
) -> Hashable:
    """By which a dense schedule is kept; None where it may not be. device may be the number of a CUDA device."""
    if (
        torch.compiler.is_compiling()
        or may_have_dispatch_mode()  # tensors may be fake, or someone counts them
        or batch * (seqlen_q + seqlen_k) > KEPT_TOKENS
    ):
        return None
    if isinstance(device, torch.device) and device.type == "cuda":
        # `cuda` is of another device when that changes, and each device's default stream is 0
        device = torch.cuda.current_device() if device.index is None else device.index
    stream = 0
    if isinstance(device, int):
        # what a graph captures lives in the graph's memory, and what it reads must live as long as the graph
        if torch.cuda.is_current_stream_capturing():
            return None
        # on another stream they might be read before they are written. torch.cuda.current_stream makes an object of it
        stream = current_stream_address(device)
    return batch, seqlen_q, seqlen_k, device, causal, window_size, stream


def _dense_schedule(
    batch: int, seqlen_q: int, seqlen_k: int, device: torch.device, causal: bool, window_size: tuple[int, int]
) -> Schedule:
    cu_seqlens_q, cu_seqlens_k = dense_cu_seqlens(batch, seqlen_q, seqlen_k, device)
    total_q, total_k = batch * seqlen_q, batch * seqlen_k
    return build_schedule(
        cu_seqlens_q, cu_seqlens_k, total_q, total_k, causal=causal, window_size=window_size, padded=False
    )


def dense_cu_seqlens(batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(batch + 1,) int32 twice, or the same twice: where documents of one length begin, and the last ends."""
    documents = torch.arange(batch + 1, dtype=torch.int32, device=device)
    cu_seqlens_q = documents * seqlen_q
    return cu_seqlens_q, cu_seqlens_q if seqlen_k == seqlen_q else documents * seqlen_k


def alignment(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int) -> tuple[Tensor, Tensor]:
    """(total_q,) int32 twice: the key that each query stands beside, and its document; ALiBi needs both."""
    side = _Side.of(cu_seqlens_q, total_q)
    beside = side.token - side.ends[side.document] + _ends(cu_seqlens_k)[side.document]
    return beside, (side.document - 1).clamp(0, max(0, cu_seqlens_q.numel() - 2))


class _Side(NamedTuple):
    """Queries or keys; documents are numbered from 1, and past the last one comes one more, which is empty."""

    starts: Tensor  # (n_docs + 2,) int32
    ends: Tensor  # (n_docs + 2,) int32
    token: Tensor  # (total,) int32
    document: Tensor  # (total,) int32: of each token

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int) -> "_Side":
        token = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
        # how many documents begin at or before the token; zero-length ones are stepped over
        document = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True)
        return cls(torch.cat([cu_seqlens[:1], cu_seqlens]), _ends(cu_seqlens), token, document)


def _ends(cu_seqlens: Tensor) -> Tensor:
    return torch.cat([cu_seqlens, cu_seqlens[-1:]])


def _paired(own: _Side, other: _Side) -> tuple[Tensor, Tensor, Tensor]:
    """Where each of own tokens' document starts and ends on the other side, and whom it stands beside: bottom right."""
    start, end = other.starts[own.document], other.ends[own.document]
    return start, end, own.token if own is other else own.token - own.ends[own.document] + end


def _visible_ranges(start: Tensor, end: Tensor, beside: Tensor, *, before: int, after: int) -> tuple[Tensor, Tensor]:
    """The range of the other side's tokens that each is paired with: (total,) int32 twice."""
    first = start if before < 0 else torch.clamp(beside - before if before else beside, start, end)
    past_last = end if after < 0 else torch.clamp(beside + (after + 1), start, end)
    return first, past_last


def _in_sight(length: int, left: int, right: int) -> int:
    """How many keys a query of a document of `length` keys may see."""
    return length if left < 0 or right < 0 else min(length, left + right + 1)


def length_class_of(in_sight: int) -> LengthClass:
    """By the keys that a query may see."""
    if in_sight <= SHORT_DOCUMENT:
        return "short"
    if in_sight < LONG_DOCUMENT:
        return "medium"
    return "long" if in_sight < VERY_LONG_DOCUMENT else "very_long"


def document_by_document(length: Tensor, tile: int) -> Tensor:
    """Tiles of `tile` queries, of documents whose keys are `length` (total_q,): those of the longest document first.

    In a document the last tile, which reads the most keys, comes first. So the tiles that run together share K and V in
    L2, and the last to run are those of the shortest document. A tile of several documents counts to the longer one of
    its first and last query, whose keys it may read.
    """
    of_last = length[tile - 1 :: tile]
    if length.numel() % tile:
        of_last = torch.cat([of_last, length[-1:]])
    longer = torch.maximum(length[::tile], of_last).long()
    n_tiles = longer.numel()
    place = torch.arange(n_tiles, device=length.device)
    return torch.argsort(longer * n_tiles + place, descending=True).to(torch.int32)


def longest_first(start: Tensor, end: Tensor) -> Tensor:
    """Tiles of 128 tokens by falling length of the range that they must read; those of one length stay in order."""
    last_end = end[WORK_TILE - 1 :: WORK_TILE]
    if start.numel() % WORK_TILE:
        last_end = torch.cat([last_end, end[-1:]])
    return torch.argsort(last_end - start[::WORK_TILE], descending=True, stable=True).to(torch.int32)
