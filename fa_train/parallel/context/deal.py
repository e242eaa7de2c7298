"""Decides which tokens of a packed stream each rank of a context group holds.

Only attention connects tokens, so a rank may hold any tokens of the stream. If possible, each rank gets whole documents
(fa_train.parallel.context.whole_documents), and no keys are sent. If whole documents cannot be assigned, the stream is
cut into equal chunks, and every rank gets the same number of chunks. The assignment of chunks starts with contiguous
shares of the stream. With contiguous shares, most documents lie within one rank, and few keys need to be sent. But
contiguous shares can need different amounts of attention work. Pairs of ranks swap runs of consecutive chunks until the
work of all ranks is almost equal.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa_train.parallel.context.whole_documents import owners_of_documents

# Chunk sizes in tokens. A tile of 128 or 192 queries should lie in one chunk. A tile with queries of two chunks would
# also read the keys between the two chunks.
CHUNK_SIZES = (384, 128, 64, 32, 8)
MAX_PADDING = 1 / 512  # padding is at most this fraction of a stream's tokens, except with the smallest chunk size
TOLERANCE = 0.002  # the busiest rank may have at most `1 + TOLERANCE` times the mean work
RUN_LENGTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96  # possible numbers of consecutive chunks in a swap
TRIED = 32  # for each length in `RUN_LENGTHS`, `balance` compares at most this number of swaps
# The cost of a swap is the number of additional chunks of keys that a rank receives, plus FIXED_COST. Because of
# FIXED_COST, one large swap costs less than several small swaps.
FIXED_COST = 4


@dataclass(frozen=True)
class Deal:
    """The assignment of the chunks of a padded stream to ranks.

    owner: (n_chunks,) int64, the rank of each chunk. Each rank holds the same number of chunks.
    chunk_size: the number of tokens of a chunk. If ranks hold whole documents, chunk_size is 1, because a document can
    have any number of tokens.
    """

    owner: np.ndarray
    chunk_size: int
    ranks: int

    @property
    def total(self) -> int:
        """The number of tokens of the padded stream."""
        return len(self.owner) * self.chunk_size

    def positions(self, rank: int) -> np.ndarray:
        """Returns the stream positions of a rank's tokens in ascending order, (total / ranks,) int64."""
        chunks = np.flatnonzero(self.owner == rank)
        return (chunks[:, None] * self.chunk_size + np.arange(self.chunk_size)).reshape(-1)

    def owner_of(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rank that holds each stream position. Shapes: (n,) -> (n,) int64."""
        return self.owner[positions // self.chunk_size]


def deal(boundaries: np.ndarray, total: int, ranks: int, *, balanced: bool = True) -> Deal:
    """Assigns the tokens of a stream to ranks. The result is the same on every rank.

    boundaries: (n_docs + 1,), the start of each document and the end of the last document, in tokens. The last document
    may end before `total`.
    balanced: whether all ranks get about the same work. If balanced is False, shares are contiguous. Contiguous shares
    are best if all layers have windows, because each token then has about the same work.
    """
    size = chunk_size_for(total, ranks)
    padded = padded_total(total, ranks, size)
    if balanced and (whole := deal_whole_documents(boundaries, padded, ranks)) is not None:
        return whole
    owner = np.arange(padded // size) * ranks // (padded // size)
    if balanced:
        start, end = causal_ranges(boundaries, padded)
        balance(owner, *work_of_chunks(start, end, size), ranks)
    return Deal(owner, size, ranks)


def chunk_size_for(total: int, ranks: int) -> int:
    """Returns the largest chunk size that pads a stream of `total` tokens by at most the fraction `MAX_PADDING`.

    If all chunk sizes pad the stream by more than this fraction, the result is the smallest chunk size.
    """
    for size in CHUNK_SIZES:
        if padded_total(total, ranks, size) <= total * (1 + MAX_PADDING):
            return size
    return CHUNK_SIZES[-1]


def padded_total(total: int, ranks: int, chunk_size: int) -> int:
    """Returns `total` rounded up, so that each rank holds the same number of full chunks."""
    return -(-total // (ranks * chunk_size)) * ranks * chunk_size


def deal_whole_documents(boundaries: np.ndarray, total: int, ranks: int) -> Deal | None:
    """Assigns whole documents to ranks, or returns None if that is not possible. boundaries: as for deal.

    total: the number of tokens of the padded stream. The tokens after the last document are distributed so that all
    ranks get the same number of tokens.
    """
    lengths, share = np.diff(boundaries), total // ranks
    owner = owners_of_documents(lengths, ranks, share)
    if owner is None:
        return None
    missing = share - np.bincount(owner, lengths, ranks).astype(np.int64)
    return Deal(np.append(owner.repeat(lengths), np.arange(ranks).repeat(missing)), 1, ranks)


def causal_ranges(boundaries: np.ndarray, total: int, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and the end of the range of keys that each token sees, (total,) int64 each.

    window: the number of keys that a token sees, including its own, or None for all earlier keys of its document.
    Tokens after the last document see no key.
    """
    token = np.arange(total)
    first = boundaries[np.searchsorted(boundaries, token, side="right") - 1]
    if window is not None:
        first = np.maximum(first, token - window + 1)
    inside = token < boundaries[-1]
    return np.where(inside, first, boundaries[-1]), np.where(inside, token + 1, boundaries[-1])


def work_of_chunks(start: np.ndarray, end: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arguments `work` and `first` of `balance`. Each chunk has `size` tokens.

    start, end: from causal_ranges.
    If chunk i contains only padding, work[i] is 0 and first[i] is i + 1, so received_chunks counts no keys for chunk i.
    """
    work = (end - start).reshape(-1, size).sum(axis=1)
    return work, np.where(work > 0, start[::size] // size, np.arange(1, len(work) + 1))


def balance(owner: np.ndarray, work: np.ndarray, first: np.ndarray, ranks: int) -> None:
    """Swaps runs of consecutive chunks in `owner` until no rank has much more work than the mean, or no swap helps.

    A rank may have at most `1 + TOLERANCE` times the mean work. In each swap, the rank with the most work and a second
    rank exchange two runs of consecutive chunks. Both runs have the same number of chunks. The second rank is the one
    with the least work among the ranks for which a swap is possible. If the work of two ranks differs by d, a swap
    moves at most d / 2 of the work from one rank to the other. Many swaps are compared. The chosen swap moves the most
    work per additional chunk of received keys. A swap can include several chunks, because a rank that gets all chunks
    of a document need not send the document's keys.

    owner: (n_chunks,), as in Deal. `balance` changes the array `owner` in place.
    work: (n_chunks,), the number of keys that each query of a chunk sees, summed over the chunk's queries.
    first: (n_chunks,), for each chunk, the index of the first chunk that its queries see. If the queries of chunk i see
    no key, first[i] is i + 1.
    """
    load = np.array([work[owner == rank].sum() for rank in range(ranks)])
    mean = load.mean()
    while load.max() > (1 + TOLERANCE) * mean:
        most = int(load.argmax())
        for least in map(int, load.argsort(kind="stable")):
            swaps = possible_swaps(owner, work, most, least, (load[most] - load[least]) // 2)
            if len(swaps.moved):
                break
        else:
            return
        held = np.stack([owner == most, owner == least])
        after = np.repeat(held[:, None], len(swaps.moved), axis=1)
        for i, (length, gives, takes) in enumerate(zip(swaps.length, swaps.gives, swaps.takes, strict=True)):
            after[:, i, gives : gives + length] = [[False], [True]]
            after[:, i, takes : takes + length] = [[True], [False]]
        # of the two ranks, the rank that receives more chunks of keys determines the time of the exchange
        before, received = (received_chunks(x, first).max(axis=0) for x in (held, after))
        useful = np.minimum(swaps.moved, load[most] - mean)
        best = int((useful / np.maximum(received - before + FIXED_COST, 1)).argmax())
        owner[after[0, best]], owner[after[1, best]] = most, least
        load[most] -= swaps.moved[best]
        load[least] += swaps.moved[best]


class Swaps(NamedTuple):
    """Possible swaps of chunks between two ranks. In a swap, each of the two ranks gives a run of consecutive chunks.

    All fields are (n,) int64. length: the number of chunks that each of the two ranks gives.
    gives: the index of the first chunk that the busier rank gives away.
    takes: the index of the first chunk that the busier rank receives.
    moved: the work that the swap takes away from the busier rank.
    """

    length: np.ndarray
    gives: np.ndarray
    takes: np.ndarray
    moved: np.ndarray


def possible_swaps(owner: np.ndarray, work: np.ndarray, most: int, least: int, limit: int) -> Swaps:
    """Returns possible swaps of chunks between the ranks `most` and `least`.

    In each swap, rank `most` gives a run of consecutive chunks, and receives a run of the same length from rank
    `least`. The work of rank `most` decreases by at least 1 and at most `limit`. For each length in `RUN_LENGTHS`, the
    result has at most `TRIED` swaps: the swaps that move the most work. No two swaps contain the same run of chunks of
    rank `most`.
    """
    before = np.append(0, work.cumsum())
    found = []
    for length in RUN_LENGTHS:
        gives, takes = (_runs(owner == rank, length) for rank in (most, least))
        given, taken = (before[runs + length] - before[runs] for runs in (gives, takes))
        order = np.argsort(taken, kind="stable")
        # For each run of chunks of the busier rank, find the run of the other rank for which the swap moves the most
        # work, but not more than `limit`. Skip a run of the busier rank if all its swaps would move more than `limit`.
        index = np.searchsorted(taken[order], given - limit)
        exists = index < len(takes)
        gives, partner = gives[exists], order[index[exists]]
        moved = given[exists] - taken[partner]
        largest = np.argsort(-moved, kind="stable")[:TRIED]
        largest = largest[moved[largest] > 0]
        found.append((np.full(len(largest), length), gives[largest], takes[partner[largest]], moved[largest]))
    return Swaps(*map(np.concatenate, zip(*found, strict=True)))


def received_chunks(held: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns how many chunks of keys a rank must receive from other ranks if it holds the chunks in `held`.

    Shapes: held (..., n_chunks) bool -> (...,). first: as for balance.
    """
    n_chunks = held.shape[-1]
    rows, chunks = np.nonzero(held.reshape(-1, n_chunks))
    size = len(held.reshape(-1, n_chunks)) * (n_chunks + 1)
    opened = np.bincount(rows * (n_chunks + 1) + first[chunks], minlength=size)
    closed = np.bincount(rows * (n_chunks + 1) + chunks + 1, minlength=size)
    needed = (opened - closed).reshape(*held.shape[:-1], n_chunks + 1).cumsum(axis=-1)[..., :-1] > 0
    return (needed & ~held).sum(axis=-1)


def _runs(held: np.ndarray, length: int) -> np.ndarray:
    """Returns each index i for which `held` is True from i to i + length - 1. Shapes: (n,) bool -> (m,) int64."""
    before = np.append(0, held.cumsum())
    return np.flatnonzero(before[length:] - before[:-length] == length)
