"""Assigns whole documents to the ranks of a context group.

If no document is cut, no query sees keys of other ranks, so the ranks need not exchange keys and gradients. But all
ranks must hold equally many tokens and have almost equal attention work. Short documents can usually be assigned whole,
and long documents usually cannot.

Documents are first assigned greedily, from the longest to the shortest. Pairs of ranks then swap single documents.
"""

from typing import NamedTuple

import numpy as np

MAX_DOCUMENTS = 2**14  # a stream with more documents is not tried, because the greedy assignment would take too long
MAX_LENGTHS = 256  # a swap considers at most this number of documents of each rank, which all have different lengths
MAX_SWAPS = 32  # owners_of_documents makes two rounds of swaps, each with at most max(MAX_SWAPS, 2 * ranks) swaps
AIM = 0.001  # swaps end when no rank has more than `1 + AIM` times the mean work
TOLERANCE = 0.01  # an assignment is rejected if a rank's work is above `1 + TOLERANCE` times the mean (see SMALL_WORK)
# The busiest rank's work may always exceed the mean work by this number of (query, visible key) pairs. A GPU computes
# attention for SMALL_WORK (query, visible key) pairs faster than ranks exchange keys and gradients.
SMALL_WORK = 2**19
NONE = -1  # used in place of a document's index if a rank gives no document in a swap


class Loads(NamedTuple):
    """The tokens and the work of each rank, (ranks,) int64 each.

    work: the number of pairs of a query and a visible key.
    """

    tokens: np.ndarray
    work: np.ndarray


class Share(NamedTuple):
    """The load that a rank should have. tokens: the maximum number of tokens. mean_work: the mean work of the ranks."""

    tokens: int
    mean_work: float

    def excess(self, loads: Loads, weight: float) -> np.ndarray:
        """Returns how far each load exceeds the share, or 0 if the load does not exceed the share. Any shape.

        The result is the sum of two terms. The first term is the work above `(1 + AIM) * mean_work`, divided by
        `mean_work`. The second term is the number of tokens above the maximum number, times `weight`.
        """
        work = np.maximum(loads.work / self.mean_work - (1 + AIM), 0)
        return weight * np.maximum(loads.tokens - self.tokens, 0) + work


def owners_of_documents(lengths: np.ndarray, ranks: int, tokens: int) -> np.ndarray | None:
    """Returns the rank of each document, or None if no assignment of whole documents was found.

    Each rank gets at most `tokens` tokens, and no rank gets much more work than the mean. Empty documents belong to
    rank 0. The result is the same on every rank.
    Shapes: lengths (n_docs,) int64, in tokens -> (n_docs,) int64.
    """
    owner = np.zeros(len(lengths), np.int64)
    used = lengths > 0  # a batch's cu_seqlens ends with many empty documents
    lengths = lengths[used]
    work = work_of_documents(lengths)
    share = Share(tokens, work.sum() / ranks)
    max_work = share.mean_work + max(TOLERANCE * share.mean_work, SMALL_WORK)
    if not share.mean_work or len(lengths) > MAX_DOCUMENTS or lengths.max() > tokens or work.max() > max_work:
        return None
    of_used = _greedy_owners(lengths, work, ranks, share)
    # If `weight` is 1 / tokens, swaps balance the ranks' work, but a rank may keep more than `tokens` tokens. If
    # `weight` is 1.0, one excess token counts as much as the mean work of a rank, so swaps remove excess tokens first.
    for weight in (1 / tokens, 1.0):
        for _ in range(max(MAX_SWAPS, 2 * ranks)):
            if not _swap(of_used, lengths, _loads(of_used, lengths, ranks), share, weight):
                break
    loads = _loads(of_used, lengths, ranks)
    if loads.tokens.max() > tokens or loads.work.max() > max_work:
        return None
    owner[used] = of_used
    return owner


def work_of_documents(lengths: np.ndarray) -> np.ndarray:
    """Returns the number of pairs of a query and a visible key in causal attention. Any shape, int64."""
    return lengths * (lengths + 1) // 2


def _loads(owner: np.ndarray, lengths: np.ndarray, ranks: int) -> Loads:
    return Loads(*(np.bincount(owner, x, ranks).astype(np.int64) for x in (lengths, work_of_documents(lengths))))


def _greedy_owners(lengths: np.ndarray, work: np.ndarray, ranks: int, share: Share) -> np.ndarray:
    """Assigns documents from the longest to the shortest, each to the rank with the smallest load so far.

    The load of a rank is the dot product of two vectors. The first vector holds the tokens and the work of the rank,
    and the second vector holds the tokens and the work of the next document. Tokens are divided by share.tokens, and
    work is divided by share.mean_work. For a long document, the load depends mainly on the rank's work. For a short
    document, the load depends mainly on the rank's tokens.
    """
    owner = np.empty(len(lengths), np.int64)
    # tokens_held: each rank's tokens divided by share.tokens. work_held: each rank's work divided by share.mean_work.
    tokens_held, work_held = [0.0] * ranks, [0.0] * ranks
    for document in np.argsort(-lengths, kind="stable"):
        of_tokens, of_work = float(lengths[document]) / share.tokens, float(work[document]) / share.mean_work
        held = [x * of_tokens + y * of_work for x, y in zip(tokens_held, work_held, strict=True)]
        rank = held.index(min(held))
        owner[document] = rank
        tokens_held[rank] += of_tokens
        work_held[rank] += of_work
    return owner


def _swap(owner: np.ndarray, lengths: np.ndarray, loads: Loads, share: Share, weight: float) -> bool:
    """Makes the swap that reduces the excess most, and returns whether a swap was made.

    The rank with the largest excess gives a document to another rank, takes one from it, or does both.
    """
    excess = share.excess(loads, weight)
    if not excess.any():
        return False
    most = int(excess.argmax())
    given, given_lengths = _one_of_each_length(owner == most, lengths)
    best, best_reduction = None, 1e-12  # a reduction of the ranks' excess by less than 1e-12 is a rounding error
    for other in range(len(excess)):
        if other == most:
            continue
        taken, taken_lengths = _one_of_each_length(owner == other, lengths)
        tokens = given_lengths[:, None] - taken_lengths
        work = work_of_documents(given_lengths)[:, None] - work_of_documents(taken_lengths)
        after = share.excess(Loads(loads.tokens[most] - tokens, loads.work[most] - work), weight)
        after += share.excess(Loads(loads.tokens[other] + tokens, loads.work[other] + work), weight)
        reduction = excess[most] + excess[other] - after.min()
        if reduction > best_reduction:
            i, j = np.unravel_index(after.argmin(), after.shape)
            best, best_reduction = (given[i], taken[j], other), reduction
    if best is None:
        return False
    given_document, taken_document, other = best
    if given_document != NONE:
        owner[given_document] = other
    if taken_document != NONE:
        owner[taken_document] = most
    return True


def _one_of_each_length(held: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents that a rank can give in a swap, one of each length, and the lengths of these documents.

    The last document in the result is NONE, with length 0.
    held: (n_docs,) bool, the documents of the rank. If the rank has documents of more than MAX_LENGTHS different
    lengths, the result has only some of these lengths.
    """
    documents = np.flatnonzero(held)
    distinct, index = np.unique(lengths[documents], return_index=True)
    step = len(distinct) // MAX_LENGTHS + 1
    return np.append(NONE, documents[index[::step]]), np.append(0, distinct[::step])
