"""Plans which keys a rank of a context group receives, and which of its own keys the rank sends.

A rank receives only the keys that its queries see. A buffer holds these keys together with the rank's own keys, in
stream order, so the keys that a query sees form one contiguous range of the buffer. The remaining rows of the buffer
are 0. The first call with a new buffer size costs more host time. The buffer size is therefore rounded up, so that only
a few sizes occur.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fa_train.parallel.context.deal import Deal, causal_ranges

STEPS = 32  # about how many sizes the buffer of a stream can have
STEP = 128  # buffer sizes are multiples of this number of rows


class Traffic(NamedTuple):
    """The keys that one rank sends and receives in each layer. All layers with the same window have the same traffic.

    `total` is the number of tokens in the padded stream. `local` is the number of the rank's own tokens. `capacity` is
    buffer_rows(total, total). Tensors are padded with 0, so that their shapes do not depend on the lengths of
    documents. A compiled model is therefore not compiled again for other lengths.
    """

    key_start: Tensor  # (local,) int32, the buffer row of the first key that each own query sees
    key_end: Tensor  # (local,) int32, 1 + the buffer row of the last key that each own query sees
    sent: Tensor  # (total,) int32, the indices of own tokens to send, grouped by the rank that receives them
    own: Tensor  # (local,) int32, the buffer row of each own token; for padding, a row that no query sees
    taken: Tensor  # (capacity,) int32, the buffer row of each received key
    shared: Tensor  # (local,) int32, the indices of own tokens that other ranks receive, ascending
    entries: Tensor  # (total,) int32, for each token in `shared`, all its positions in `sent`
    offsets: Tensor  # (local + 1,) int32, where each token's group starts in `entries`, then the end of the last group
    sizes: list[list[int]]  # two lists: the number of tokens sent to each rank, and the number received from each rank
    counts: list[int]  # three counts: rows of the buffer, tokens in `shared`, and keys in the buffer


def traffic(deal: Deal, boundaries: np.ndarray, rank: int, window: int | None) -> Traffic:
    """Returns the traffic of `rank`. The host computes it from document boundaries, without the GPU.

    boundaries, window: as for causal_ranges.
    """
    start, end = causal_ranges(boundaries, deal.total, window)
    mine = deal.positions(rank)
    needed = keys_needed(mine, start, end, deal.total)
    buffered = np.flatnonzero(needed)  # the stream position of each buffer row
    owner = deal.owner_of(buffered)
    arriving = np.argsort(owner, kind="stable")  # the buffer row of each key, grouped by the rank that holds the key
    arriving = arriving[owner[arriving] != rank]
    rows, capacity = buffer_rows(len(buffered), deal.total), buffer_rows(deal.total, deal.total)
    before = np.append(0, needed.cumsum())  # the number of needed keys before each position
    sent = [_needed_by(deal, other, mine, start, end) if other != rank else mine[:0] for other in range(deal.ranks)]
    shared, numbers = np.unique(np.concatenate(sent), return_counts=True)
    received = np.bincount(owner[owner != rank], minlength=deal.ranks)
    return Traffic(
        torch.from_numpy(before[start[mine]].astype(np.int32)),
        torch.from_numpy(before[end[mine]].astype(np.int32)),
        _filled(np.concatenate(sent), deal.total),
        torch.from_numpy(np.where(needed[mine], before[mine], rows - 1).astype(np.int32)),
        _filled(arriving, capacity),
        _filled(shared, len(mine)),
        _filled(np.argsort(np.concatenate(sent), kind="stable"), deal.total),
        _filled(np.append(0, numbers.cumsum()), len(mine) + 1),
        [[len(tokens) for tokens in sent], received.tolist()],
        [rows, len(shared), len(buffered)],
    )


def buffer_rows(n_keys: int, total: int) -> int:
    """Returns the number of rows of a buffer for n_keys keys.

    The result is greater than n_keys. For a given `total`, it has about `STEPS` possible values.
    """
    step = STEP * -(-total // (STEPS * STEP))
    return (n_keys // step + 1) * step


def _needed_by(deal: Deal, rank: int, held: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns which tokens in `held` the queries of `rank` see, as ascending indices into `held`."""
    return np.flatnonzero(keys_needed(deal.positions(rank), start, end, deal.total)[held])


def keys_needed(positions: np.ndarray, start: np.ndarray, end: np.ndarray, total: int) -> np.ndarray:
    """Returns which keys of the stream the queries at `positions` see, (total,) bool.

    start, end: (total,), the key range of each query of the stream, from causal_ranges.
    """
    # The key ranges of neighbouring queries overlap or touch, so consecutive queries together see one contiguous range.
    first = np.append(True, np.diff(positions) != 1)
    last = np.append(first[1:], True)
    opened = np.zeros(total + 1, np.int64)
    np.add.at(opened, start[positions[first]], 1)
    np.add.at(opened, end[positions[last]], -1)
    return opened[:-1].cumsum() > 0


def _filled(values: np.ndarray, size: int) -> Tensor:
    result = torch.zeros(size, dtype=torch.int32)
    result[: len(values)] = torch.from_numpy(values)
    return result
