"""Plans which keys a rank of a context group receives, and which of its own keys the rank sends.

A rank receives only the keys that its queries see. Queries that see keys of other ranks are called crossing queries. A
buffer holds all keys that the crossing queries see: the keys that the rank receives, and some of the rank's own keys.
The buffer holds the keys in stream order, so each query that reads the buffer sees one contiguous range of rows. Buffer
rows that hold no key are 0. A query that is not a crossing query sees only the rank's own keys, which attention reads
without copying them to the buffer.

Attention can run twice: first for the queries that see only the rank's own keys, and then for the crossing queries.
Attention runs only once if a single run for all queries is faster than two runs. A single run is faster if many queries
of any rank see keys of other ranks, or if there is little attention work. If ranks exchange keys and run attention only
once, all queries read their keys from the buffer. If no query of any rank sees keys of other ranks, nothing is sent,
and flash attention runs once over each rank's own keys. All ranks run attention the same number of times. If only some
ranks ran attention twice, a rank with a single run could wait for keys while another rank computes its first run.

The first call with a new buffer size or a new number of queries costs more host time. Buffer sizes and numbers of
queries are therefore rounded up, so that only a few values occur.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fa_train.parallel.context.deal import Deal, causal_ranges

STEPS = 32  # for each stream length, there are at most STEPS + 1 buffer sizes
STEP = 128  # buffer sizes are multiples of this number of rows
# Attention runs once if, on any rank, more than this fraction of the queries see keys of other ranks. Two runs,
# including the copies of queries that the second run needs, would then take about as long as one run.
MAX_CROSSING = 1 / 16
# Attention is split into two runs only if a rank has, on average, at least MIN_PAIRS (query, visible key) pairs. For
# MIN_PAIRS pairs, the GPU needs more time to compute attention than the host needs to launch the kernels of two runs.
MIN_PAIRS = 2**23


class Traffic(NamedTuple):
    """The keys that one rank sends and receives in each layer. All layers with the same window have the same traffic.

    `total` is the number of tokens in the padded stream. `local` is the number of the rank's own tokens. `capacity` is
    buffer_rows(total, total). Tensors are padded, so that their shapes do not depend on the lengths of documents. A
    compiled model is therefore not compiled again for other document lengths.

    Example: two ranks share one document of 8 tokens, which is cut into chunks of 2 tokens.

        position in the stream    0 1 2 3 4 5 6 7
        rank that holds it        0 0 1 1 1 1 0 0
        index within the rank     0 1 0 1 2 3 2 3

    The traffic of rank 0, without padding, if attention runs twice:

        own_start = [0, 0, 2, 3]     the queries at positions 0 and 1 see only keys of rank 0,
        own_end   = [1, 2, 2, 3]     and the ranges of the crossing queries are empty
        crossing  = [2, 3]           the queries at positions 6 and 7 see keys of rank 1
        key_start = [0, 0]           the buffer has one row for each of the 8 keys, in stream order
        key_end   = [7, 8]
        kept      = [0, 1, 2, 3]     rank 0 copies its own keys
        kept_rows = [0, 1, 6, 7]     to these rows of the buffer
        taken     = [2, 3, 4, 5]     the keys that rank 1 sends go to these rows
        sent      = [0, 1]           the queries of rank 1 see the keys at positions 0 and 1
        summed    = [0, 1, 2, 3]     tokens 0 and 1 get gradients from rank 1 and from rank 0's own buffer,
        offsets   = [0, 2, 4, 5, 6]  tokens 2 and 3 only from rank 0's own buffer
        entries   = [0, 2, 1, 3, 4, 5]
    """

    key_start: Tensor  # (local,) int32, for each query in `crossing`, the buffer row of the first key that it sees
    key_end: Tensor  # (local,) int32, for each query in `crossing`, 1 + the buffer row of the last key that it sees
    # own_start, own_end: (local,) int32, the start and the end of the range of this rank's keys that each query sees.
    # A query that sees keys of other ranks has an empty range, because the buffer holds all keys that the query sees.
    own_start: Tensor
    own_end: Tensor
    crossing: Tensor  # (local,) int32, the indices of this rank's tokens whose queries read the buffer, ascending
    sent: Tensor  # (total,) int32, the indices of this rank's tokens to send, grouped by the rank that receives them
    kept: Tensor  # (local,) int32, the indices of this rank's tokens whose keys are in the buffer, ascending
    kept_rows: Tensor  # (local,) int32, the buffer row of each token in `kept`
    taken: Tensor  # (capacity,) int32, the buffer row of each received key
    summed: Tensor  # (local,) int32, the indices of this rank's tokens that get gradients from `entries`, ascending
    # entries: (total,) int32, the indices of the gradient rows (see `_returns`) that are added for the tokens in
    # `summed`. All indices for the first token in `summed` come before the indices for the second token.
    entries: Tensor
    offsets: Tensor  # (local + 1,) int32, the start of each token's group in `entries`, then the end of the last group
    sizes: list[list[int]]  # two lists: the number of tokens sent to each rank, and the number received from each rank
    counts: list[int]  # the fields of Counts


class Counts(NamedTuple):
    """How many entries of the padded tensors of Traffic are used.

    rows: the number of rows of the buffer. keys: the number of rows that hold a key; all other rows are 0.
    summed: the number of tokens in the tensor Traffic.summed. kept: the number of tokens in the tensor Traffic.kept.
    crossing: the number of queries that read the buffer. queries: `crossing` rounded up.
    splits: whether only the queries that see keys of other ranks read the buffer (1), or all queries read it (0).
    exchanges: whether ranks exchange keys (1 or 0). Ranks exchange keys if `may_split` is false or any query sees keys
    of other ranks. If `exchanges` is 0, flash attention runs once, over the rank's own keys. If `splits` is 1 and
    `exchanges` is 1, attention runs twice: first over the rank's own keys, and then over the keys in the buffer.
    """

    rows: int
    keys: int
    summed: int
    kept: int
    crossing: int
    queries: int
    splits: int
    exchanges: int


def traffic(deal: Deal, boundaries: np.ndarray, rank: int, window: int | None, *, may_split: bool = True) -> Traffic:
    """Computes the traffic of `rank` on the host from document boundaries, without the GPU.

    boundaries, window: as for causal_ranges.
    may_split: if False, attention runs once, and all queries read the buffer. If may_split is True, attention may also
    run twice, or run once over only the rank's own keys. Only flash attention supports may_split=True.
    """
    start, end = causal_ranges(boundaries, deal.total, window)
    mine = deal.positions(rank)
    n_own = len(mine)
    crosses = crossing_queries(deal, start, end)
    n_crossing = np.bincount(deal.owner_of(np.flatnonzero(crosses)), minlength=deal.ranks)
    enough_work = int((end - start).sum()) >= MIN_PAIRS * deal.ranks
    exchanges = not may_split or bool(crosses.any())
    splits = may_split and (not exchanges or (enough_work and int(n_crossing.max()) <= MAX_CROSSING * n_own))
    crossing = np.flatnonzero(crosses[mine]) if splits else np.arange(n_own)
    own_start, own_end = own_ranges(mine, start, end, crosses[mine])
    needed = keys_needed(mine[crossing], start, end, deal.total)
    buffered = np.flatnonzero(needed)  # for each key in the buffer, its position in the stream of tokens
    owner = deal.owner_of(buffered)
    arriving = np.argsort(owner, kind="stable")  # the buffer row of each key, grouped by the rank that holds the key
    arriving = arriving[owner[arriving] != rank]
    before = np.append(0, needed.cumsum())  # for each stream position, the number of earlier keys that are needed
    kept = np.flatnonzero(needed[mine])
    sent = [_needed_by(deal, other, mine, start, end) if other != rank else mine[:0] for other in range(deal.ranks)]
    summed, entries, offsets = _returns(np.concatenate(sent), kept if splits else kept[:0])
    received = np.bincount(owner[owner != rank], minlength=deal.ranks)
    n_keys, capacity = len(buffered), buffer_rows(deal.total, deal.total)
    n_queries = query_rows(len(crossing), n_own) if splits else n_own
    counts = Counts(
        rows=buffer_rows(n_keys, deal.total),
        keys=n_keys,
        summed=len(summed),
        kept=len(kept),
        crossing=len(crossing),
        queries=n_queries,
        splits=int(splits),
        exchanges=int(exchanges),
    )
    return Traffic(
        key_start=_filled(before[start[mine[crossing]]], n_own, n_keys),
        key_end=_filled(before[end[mine[crossing]]], n_own, n_keys),
        own_start=_filled(own_start, n_own),
        own_end=_filled(own_end, n_own),
        crossing=_filled(crossing, n_own),
        sent=_filled(np.concatenate(sent), deal.total),
        kept=_filled(kept, n_own),
        kept_rows=_filled(before[mine[kept]], n_own),
        taken=_filled(arriving, capacity),
        summed=_filled(summed, n_own),
        entries=_filled(entries, deal.total),
        offsets=_filled(offsets, n_own + 1),
        sizes=[[len(tokens) for tokens in sent], received.tolist()],
        counts=list(counts),
    )


def crossing_queries(deal: Deal, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns which queries of the stream see keys of other ranks, (total,) bool. start, end: from causal_ranges."""
    n_chunks = len(deal.owner)
    # for each run of consecutive chunks that one rank holds, the index after the last chunk
    ends = np.append(np.flatnonzero(np.diff(deal.owner)) + 1, n_chunks)
    end_of_run = deal.chunk_size * ends[np.searchsorted(ends, np.arange(n_chunks), side="right")]
    result: np.ndarray = end > end_of_run[np.minimum(start // deal.chunk_size, n_chunks - 1)]
    return result


def own_ranges(
    mine: np.ndarray, start: np.ndarray, end: np.ndarray, crosses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns own_start and own_end of Traffic: for each query, the range of this rank's keys that the query sees.

    mine: (local,), the stream positions of this rank's tokens, ascending. start, end: (total,), from causal_ranges.
    crosses: (local,) bool, whether each query sees keys of other ranks. A query that sees keys of other ranks gets an
    empty range of this rank's keys.
    The returned starts are in ascending order, and so are the returned ends. An empty range starts at the smaller of
    two indices: the index of the query's own token, and the start of the next range that is not empty. A kernel that
    loops over the queries of a tile of keys then visits only few queries with an empty range.
    Shape of both results: (local,).
    """
    n_own = len(mine)
    own_start, own_end = np.searchsorted(mine, start[mine]), np.searchsorted(mine, end[mine])
    next_start = np.minimum.accumulate(np.where(crosses, n_own, own_start)[::-1])[::-1]
    empty = np.minimum(np.arange(n_own), next_start)
    return np.where(crosses, empty, own_start), np.where(crosses, empty, own_end)


def _returns(sent: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `summed`, `entries` and `offsets` of Traffic.

    One tensor holds all gradient rows that must be added. The first rows of this tensor are the gradients that other
    ranks send back, in the order of `sent`. The remaining rows are the gradients in this rank's own buffer, in the
    order of `kept`.
    """
    tokens = np.concatenate([sent, kept])
    summed, numbers = np.unique(tokens, return_counts=True)
    return summed, np.argsort(tokens, kind="stable"), np.append(0, numbers.cumsum())


def buffer_rows(n_keys: int, total: int) -> int:
    """Returns the number of rows of a buffer for n_keys keys.

    The result is greater than n_keys, so a buffer has rows even if n_keys is 0. For a given `total`, at most
    `STEPS` + 1 different results are possible.
    """
    step = STEP * -(-total // (STEPS * STEP))
    return (n_keys // step + 1) * step


def query_rows(n_queries: int, limit: int) -> int:
    """Returns n_queries rounded up to a multiple of `STEP`, or `limit` if `limit` is smaller. 0 counts as 1.

    If n_queries is at least 8 * `STEP`, n_queries is rounded up to a multiple of the power of two that lies between
    n_queries / 8 and n_queries / 4. From one power of two to the next, at most four different results are possible.
    """
    n_queries = max(n_queries, 1)
    step = max(STEP, 2 ** (n_queries.bit_length() - 3))
    return min(-(-n_queries // step) * step, limit)


def _needed_by(deal: Deal, rank: int, held: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns which tokens in `held` the queries of `rank` see, as ascending indices into `held`."""
    return np.flatnonzero(keys_needed(deal.positions(rank), start, end, deal.total)[held])


def keys_needed(positions: np.ndarray, start: np.ndarray, end: np.ndarray, total: int) -> np.ndarray:
    """Returns a mask, (total,) bool, that is True for each key of the stream that any query at `positions` sees.

    start, end: (total,), the key range of each query of the stream, from causal_ranges.
    """
    opened = np.zeros(total + 1, np.int64)
    if len(positions):
        # The key ranges of neighbouring queries overlap or touch, so consecutive queries together see one contiguous
        # range.
        first = np.append(True, np.diff(positions) != 1)
        last = np.append(first[1:], True)
        np.add.at(opened, start[positions[first]], 1)
        np.add.at(opened, end[positions[last]], -1)
    return opened[:-1].cumsum() > 0


def _filled(values: np.ndarray, size: int, value: int = 0) -> Tensor:
    result = torch.full((size,), value, dtype=torch.int32)
    result[: len(values)] = torch.from_numpy(values.astype(np.int32))
    return result
