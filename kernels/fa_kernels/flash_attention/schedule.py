"""The schedule of a batch: which keys each query sees, and the order in which kernels process tiles.

A schedule is built once per batch, and all layers share it. With documents, causality and windows, a query sees one
contiguous range of keys, so two integers per token describe the mask of a batch. The start and the end of a query's
range never decrease from one query to the next. A tile of queries therefore reads one contiguous range of keys. Only
the blocks at both ends of a tile's range need a mask.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa_kernels.flash_attention import schedule_cache, schedule_kernel

WORK_TILE = 128  # tokens per tile in query_tiles and key_tiles; must be a multiple of the kernels' block sizes
WIDE_TILE = 192  # tokens per tile in wide_query_tiles, for Hopper's forward kernels with tiles of 192 rows
# Bounds between the length classes. Here, the length of a document is the largest number of keys that a query can see.
# docs/hopper.md says which kernels run for each length class.
SHORT_DOCUMENT = 2**9  # for shorter documents, key_tiles is ascending, so that neighbouring tiles share queries in L2
LONG_DOCUMENT = 2**12  # Hopper's forward processes few heads at a time for packed documents of this length or more
VERY_LONG_DOCUMENT = 2**16

LengthClass = Literal["short", "medium", "long", "very_long"]


class Schedule(NamedTuple):
    """The range of keys that each query sees, the range of queries that see each key, and the order of tiles.

    All tensors are int32, on the device of q, k and v. Token indices are positions in the whole batch.

    Query i sees key j if and only if `key_start[i] <= j < key_end[i]`, which is equivalent to
    `query_start[j] <= i < query_end[j]`. For example, two documents of 2 and 3 tokens, with a causal mask (x: visible):

               key j   0 1 2 3 4   key_start  key_end
        query i = 0    x               0         1
                  1    x x             0         2
                  2        x           2         3
                  3        x x         2         4
                  4        x x x       2         5
        query_start    0 1 2 3 4
        query_end      2 2 5 5 5
    """

    key_start: Tensor  # (total_q,)
    key_end: Tensor  # (total_q,)
    query_start: Tensor  # (total_k,)
    query_end: Tensor  # (total_k,)
    query_tiles: Tensor  # (ceil(total_q / WORK_TILE),), tile indices; tiles of the longest document come first
    key_tiles: Tensor  # (ceil(total_k / WORK_TILE),), sorted like query_tiles, or ascending if documents are short
    wide_query_tiles: Tensor  # (ceil(total_q / WIDE_TILE),), sorted like query_tiles
    length_class: LengthClass  # determines which kernels run; the host computes it without waiting for the GPU
    # `crosses_documents` is True if there are several documents, or if tokens may follow the last document. If
    # `crosses_documents` is True, kernels isolate NaN, so that NaN in one document does not reach other documents.
    crosses_documents: bool
    is_one_causal_document: bool  # if True, scaled_dot_product_attention can use is_causal=True instead of a mask

    def tensors(self) -> list[Tensor]:
        """Returns the seven tensors, in the order of the fields. Torch operators accept tensors, but no Schedule."""
        return [*self[:7]]

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], crosses_documents: bool, length_class: LengthClass = "medium"
    ) -> "Schedule":
        """Returns a Schedule that holds the given tensors, which must be in the order of Schedule.tensors().

        Only the forward pass needs `length_class`.
        """
        key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles = tensors
        ranges = key_start, key_end, query_start, query_end
        orders = query_tiles, key_tiles, wide_query_tiles
        return cls(*ranges, *orders, length_class, crosses_documents, is_one_causal_document=False)


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
    gradients: bool = True,
) -> Schedule:
    """Returns the schedule of packed queries and keys. The GPU computes the schedule, and the host does not wait.

    In each document, the last query is aligned with the last key, the second-to-last query with the second-to-last key,
    and so on (flash-attn's bottom-right alignment). Tokens after the last document see no token, and no token sees
    them.

    Args:
        cu_seqlens_q, cu_seqlens_k: (n_docs + 1,) int32, both with the same number of documents.
        total_q, total_k: the numbers of rows of q and of k.
        causal: whether to replace `right` in window_size by 0.
        window_size: (left, right), the numbers of keys that a query sees before and after the key with which the query
            is aligned. A negative `left` or `right` means all keys on that side.
        padded: whether there can be tokens after the last document.
        seqlen: the number of keys per document, which determines the length class. The default is the mean number of
            keys per document.
        gradients: whether the schedule must also serve backward passes. If gradients is False, the fields that only
            backward passes read (query_start, query_end, key_tiles) may be empty.
    """
    left, right = window_size
    if causal:
        right = 0
    crosses_documents = padded or cu_seqlens_k.numel() > 2
    mean = total_k // max(1, cu_seqlens_k.numel() - 1)  # entries that pad cu_seqlens also count as documents
    tensors: Sequence[Tensor]
    keys_in_order = _keys_in_sight(mean, left, right) < SHORT_DOCUMENT
    documents = cu_seqlens_q, cu_seqlens_k, total_q, total_k, (left, right)
    if schedule_kernel.can_run(cu_seqlens_q, cu_seqlens_k):
        tensors = schedule_kernel.schedule_tensors(
            *documents, keys_in_order=keys_in_order, gradients=gradients, work_tile=WORK_TILE, wide_tile=WIDE_TILE
        )
    else:
        tensors = tensors_by_torch(*documents, keys_in_order=keys_in_order)
    length_class = length_class_of(_keys_in_sight(mean if seqlen is None else seqlen, left, right))
    return Schedule.from_tensors(tensors, crosses_documents, length_class)


def tensors_by_torch(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    window: tuple[int, int],
    *,
    keys_in_order: bool,
) -> tuple[Tensor, ...]:
    """Computes the seven tensors of a Schedule with torch operators, which compilers can trace and all devices support.

    schedule_kernel.schedule_tensors computes the same values on a GPU, if it is called with gradients=True.
    """
    left, right = window
    # Clamping keeps the ranges inside q, k and v even if cu_seqlens are wrong.
    queries = _Documents.of(cu_seqlens_q.clamp(0, total_q), total_q)
    keys = queries
    if cu_seqlens_k is not cu_seqlens_q or total_k != total_q:
        keys = _Documents.of(cu_seqlens_k.clamp(0, total_k), total_k)
    keys_of_queries = _paired(queries, keys)
    queries_of_keys = keys_of_queries if keys is queries else _paired(keys, queries)
    key_start, key_end = _visible_ranges(*keys_of_queries, before=left, after=right)
    query_start, query_end = _visible_ranges(*queries_of_keys, before=right, after=left)
    if keys_in_order:
        key_tiles = torch.arange(-(-total_k // WORK_TILE), dtype=torch.int32, device=cu_seqlens_k.device)
    else:
        length = queries_of_keys.end - queries_of_keys.start
        key_tiles = document_by_document(length, WORK_TILE, last_first=False)
    length = keys_of_queries.end - keys_of_queries.start
    query_tiles = document_by_document(length, WORK_TILE, last_first=True)
    wide_query_tiles = document_by_document(length, WIDE_TILE, last_first=True)
    return key_start, key_end, query_start, query_end, query_tiles, key_tiles, wide_query_tiles


def schedule_of_ranges(key_start: Tensor, key_end: Tensor, total_k: int, length_class: LengthClass) -> Schedule:
    """Returns the schedule in which query i sees the keys from key_start[i] to key_end[i] - 1.

    The queries may be a part of a packed stream, as in context parallelism.
    Shapes: key_start, key_end (total_q,) int32. key_start and key_end must not decrease from one query to the
    next.
    """
    key = torch.arange(total_k, dtype=torch.int32, device=key_start.device)
    # query_start is the number of queries that see only keys before `key`. query_end is the number of queries whose
    # first visible key is `key` or an earlier key.
    query_start = torch.searchsorted(key_end, key, right=True, out_int32=True)
    query_end = torch.searchsorted(key_start, key, right=True, out_int32=True)
    query_end = torch.maximum(query_start, query_end)
    # The order of tiles treats queries with the same first key as one document, whose last query sees the most keys.
    # With a window, few queries have the same first key, so most of these documents have one query.
    last_query = torch.searchsorted(key_start, key_start, right=True) - 1
    first_key = torch.searchsorted(query_end, query_end)
    length = key_end[last_query] - key_start
    # tiles of queries that see no key come last, in ascending order
    length = torch.where(length > 0, length, -torch.arange(len(length), dtype=torch.int32, device=length.device))
    if length_class == "short":
        key_tiles = torch.arange(-(-total_k // WORK_TILE), dtype=torch.int32, device=key_start.device)
    else:
        document = torch.where(query_end > query_start, query_end - query_start[first_key], 0)  # unseen keys come last
        key_tiles = document_by_document(document, WORK_TILE, last_first=False)
    return Schedule(
        key_start,
        key_end,
        query_start,
        query_end,
        query_tiles=document_by_document(length, WORK_TILE, last_first=True),
        key_tiles=key_tiles,
        wide_query_tiles=document_by_document(length, WIDE_TILE, last_first=True),
        length_class=length_class,
        crosses_documents=True,
        is_one_causal_document=False,
    )


def causal_schedule(cu_seqlens: Tensor | None, total: int, device: torch.device, seqlen: int | None = None) -> Schedule:
    """Returns the schedule of causal self-attention over `total` tokens. cu_seqlens of None means one document."""
    if cu_seqlens is None:
        return dense_schedule(1, total, total, device, causal=True)._replace(is_one_causal_document=True)
    return build_schedule(cu_seqlens, cu_seqlens, total, total, causal=True, seqlen=seqlen)


def dense_schedule(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Schedule:
    """Returns the schedule of a dense batch, in which all documents have seqlen_q queries and seqlen_k keys.

    `device` is a torch.device or the index of a CUDA device. Recent schedules are cached (schedule_cache.py).
    """
    return schedule_cache.find_or_build(_build_dense_schedule, batch, seqlen_q, seqlen_k, device, causal, window_size)


def _build_dense_schedule(
    batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | int, causal: bool, window_size: tuple[int, int]
) -> Schedule:
    device = torch.device("cuda", device) if isinstance(device, int) else device
    cu_seqlens_q, cu_seqlens_k = dense_cu_seqlens(batch, seqlen_q, seqlen_k, device)
    total_q, total_k = batch * seqlen_q, batch * seqlen_k
    return build_schedule(
        cu_seqlens_q, cu_seqlens_k, total_q, total_k, causal=causal, window_size=window_size, padded=False
    )


def dense_cu_seqlens(batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cu_seqlens_q and cu_seqlens_k, (batch + 1,) int32.

    If seqlen_q equals seqlen_k, cu_seqlens_q and cu_seqlens_k are the same tensor.
    """
    documents = torch.arange(batch + 1, dtype=torch.int32, device=device)
    cu_seqlens_q = documents * seqlen_q
    return cu_seqlens_q, cu_seqlens_q if seqlen_k == seqlen_q else documents * seqlen_k


def alignment(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int) -> tuple[Tensor, Tensor]:
    """Returns the tensors `aligned` and `document` that ALiBi needs (features.py), both (total_q,) int32.

    `aligned` holds the index of the key with which each query is aligned. `document` holds the index of each query's
    document.
    """
    queries = _Documents.of(cu_seqlens_q, total_q)
    aligned = queries.token - queries.ends[queries.document] + _ends(cu_seqlens_k)[queries.document]
    return aligned, (queries.document - 1).clamp(0, max(0, cu_seqlens_q.numel() - 2))


class _Documents(NamedTuple):
    """The documents of the queries, or the documents of the keys.

    Documents are counted from 1. Queries after the last document belong to an additional document that has no keys.
    Keys after the last document belong to an additional document that has no queries.
    """

    starts: Tensor  # (n_docs + 2,) int32
    ends: Tensor  # (n_docs + 2,) int32
    token: Tensor  # (total,) int32
    document: Tensor  # (total,) int32, the document of each token

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int) -> "_Documents":
        token = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
        # Documents are counted from 1, so the index of a token's document is the number of documents that begin at or
        # before the token. No token belongs to an empty document of cu_seqlens.
        document = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True)
        return cls(torch.cat([cu_seqlens[:1], cu_seqlens]), _ends(cu_seqlens), token, document)


def _ends(cu_seqlens: Tensor) -> Tensor:
    return torch.cat([cu_seqlens, cu_seqlens[-1:]])


class _Paired(NamedTuple):
    """The keys of each query's document, or the queries of each key's document. Each field is (total,) int32."""

    start: Tensor  # the index of the first key (or query) of the document
    end: Tensor  # the index after the last key (or query) of the document
    aligned: Tensor  # the index of the key (or query) that the token is aligned with


def _paired(own: _Documents, other: _Documents) -> _Paired:
    """Returns `start`, `end` and `aligned` for each token in `own`, as indices of tokens in `other`."""
    start, end = other.starts[own.document], other.ends[own.document]
    return _Paired(start, end, own.token if own is other else own.token - own.ends[own.document] + end)


def _visible_ranges(start: Tensor, end: Tensor, aligned: Tensor, *, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Returns the start and the end of each token's range, both (total,) int32.

    The range of a query contains keys, and the range of a key contains queries.
    """
    first = start if before < 0 else torch.clamp(aligned - before if before else aligned, start, end)
    past_last = end if after < 0 else torch.clamp(aligned + (after + 1), start, end)
    return first, past_last


def _keys_in_sight(length: int, left: int, right: int) -> int:
    """Returns the largest number of keys that a query can see in a document of `length` keys."""
    return length if left < 0 or right < 0 else min(length, left + right + 1)


def length_class_of(keys_in_sight: int) -> LengthClass:
    """Returns the length class of documents whose queries see at most `keys_in_sight` keys."""
    if keys_in_sight <= SHORT_DOCUMENT:
        return "short"
    if keys_in_sight < LONG_DOCUMENT:
        return "medium"
    return "long" if keys_in_sight < VERY_LONG_DOCUMENT else "very_long"


def document_by_document(length: Tensor, tile: int, *, last_first: bool) -> Tensor:
    """Returns the order of tiles of `tile` tokens: all tiles of the longest document come first.

    In the returned order, tiles that run at the same time share keys (or queries) in L2. The tiles of the shortest
    document run last. If a tile holds several documents, the longer of its first and last document determines the
    tile's position.

    For example, tiles of 2 tokens in documents of 3 and 5 tokens: tile 0 is in the document of 3 tokens, tile 1 in both
    documents, and tiles 2 and 3 in the document of 5 tokens.

    >>> length = torch.tensor([3, 3, 3, 5, 5, 5, 5, 5])
    >>> document_by_document(length, 2, last_first=True).tolist()
    [3, 2, 1, 0]
    >>> document_by_document(length, 2, last_first=False).tolist()
    [1, 2, 3, 0]

    Args:
        length: (total,), the length of each token's document. For tiles of queries, `length` holds the number of keys
            in each query's document. For tiles of keys, `length` holds the number of queries in each key's document.
        last_first: whether a document's last tile comes first. Under a causal mask, the last tile of queries and the
            first tile of keys of a document have the most work.
    """
    of_last = length[tile - 1 :: tile]
    if length.numel() % tile:
        of_last = torch.cat([of_last, length[-1:]])
    longer = torch.maximum(length[::tile], of_last).long()
    n_tiles = longer.numel()
    tie_break = torch.arange(n_tiles, device=length.device)
    return torch.argsort(longer * n_tiles + (tie_break if last_first else -tie_break), descending=True).to(torch.int32)
