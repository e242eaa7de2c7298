"""Decides which tokens of a packed stream each rank of a context group holds.

Only attention connects tokens, so a rank may hold any tokens of the stream. The stream is cut into equal chunks, and
every rank gets the same number of chunks. The assignment starts with contiguous shares of the stream. Most documents
then lie within one rank, and few keys need to be sent. But contiguous shares can need different amounts of attention
work. The chunks of two ranks are therefore swapped, one for one, until the work of all ranks is almost equal.
"""

from dataclasses import dataclass

import numpy as np

# Chunk sizes in tokens. A tile of 128 or 192 queries should lie in one chunk, because it reads all keys between its
# queries. If chunks of 384 pad a stream by more than `MAX_PADDING`, smaller chunks are used.
CHUNK_SIZES = (384, 128, 64, 32, 8)
MAX_PADDING = 1 / 64
TOLERANCE = 0.01  # the busiest rank may have at most `1 + TOLERANCE` times the mean work


@dataclass(frozen=True)
class Deal:
    """Which rank holds each chunk of a padded stream.

    owner: (n_chunks,) int64, the rank of each chunk. Each rank holds the same number of chunks.
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


def chunk_size_for(total: int, ranks: int) -> int:
    """Returns the largest chunk size that pads a stream of `total` tokens by at most the fraction `MAX_PADDING`."""
    for size in CHUNK_SIZES:
        if padded_total(total, ranks, size) <= total * (1 + MAX_PADDING):
            return size
    return CHUNK_SIZES[-1]


def padded_total(total: int, ranks: int, chunk_size: int) -> int:
    """Returns `total` rounded up, so that each rank holds the same number of full chunks."""
    return -(-total // (ranks * chunk_size)) * ranks * chunk_size


def deal(boundaries: np.ndarray, total: int, ranks: int, *, balanced: bool = True) -> Deal:
    """Assigns the chunks of a stream to ranks. The result is the same on every rank.

    boundaries: (n_docs + 1,), the first token of each document, then the end of the last document, which is at most
    `total`.
    balanced: whether ranks exchange chunks; otherwise, their shares stay contiguous. Contiguous shares are best if all
    layers have windows, because each token then has about the same work.
    """
    size = chunk_size_for(total, ranks)
    padded = padded_total(total, ranks, size)
    owner = np.arange(padded // size) * ranks // (padded // size)
    if balanced:
        start, end = causal_ranges(boundaries, padded)
        exchange(owner, (end - start).reshape(-1, size).sum(axis=1), ranks)
    return Deal(owner, size, ranks)


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


def exchange(owner: np.ndarray, work: np.ndarray, ranks: int) -> None:
    """Exchanges pairs of chunks in `owner` until no rank has much more work than the mean, or no exchange helps.

    A rank is allowed `1 + TOLERANCE` times the mean work. In each exchange, the rank with the most work and the rank
    with the least work swap one chunk each. The exchange moves as much work as possible, but at most half of the work
    by which the two ranks differ. Few exchanges are then enough, so a rank's tokens stay nearly contiguous.
    """
    load = np.array([work[owner == rank].sum() for rank in range(ranks)])
    limit = (1 + TOLERANCE) * load.mean()
    while load.max() > limit:
        most, least = int(load.argmax()), int(load.argmin())
        gives, takes = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        takes = takes[np.argsort(work[takes], kind="stable")]
        half = (load[most] - load[least]) // 2
        # for each chunk of the busiest rank, find the chunk of least work such that the exchange moves at most `half`
        index = np.searchsorted(work[takes], work[gives] - half)
        moved = work[gives] - work[takes[index.clip(max=len(takes) - 1)]]
        moved[index == len(takes)] = 0
        best = int(moved.argmax())
        if moved[best] <= 0:
            return
        given, taken = gives[best], takes[index[best]]
        owner[given], owner[taken] = least, most
        load[most] -= moved[best]
        load[least] += moved[best]
