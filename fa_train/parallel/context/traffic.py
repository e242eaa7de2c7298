"""Plans which keys a rank of a context group receives, and which of its own keys the rank sends.

A rank receives only the keys that its queries see, and collects these keys in a buffer. A rank also receives its own
keys, from itself. Because the buffer is in stream order, the keys that a query sees form one contiguous range.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fa_train.parallel.context.deal import Deal, causal_ranges


class Traffic(NamedTuple):
    """The keys that one rank sends and receives in each layer. All layers with the same window have the same traffic.

    `total` is the number of tokens in the padded stream. Tensors are padded with zeros, so their shapes depend only on
    `total` and the number of ranks. A compiled model is therefore not compiled again if documents have other lengths.
    """

    key_start: Tensor  # (local,) int32, the index in the buffer of the first key that each own query sees
    key_end: Tensor  # (local,) int32, 1 + the index of the last key that each own query sees
    sent: Tensor  # (total,) int32, the indices of own tokens to send, grouped by the rank that receives them
    place: Tensor  # (total,) int32, for each row of the buffer, the index of the received row to copy
    sizes: list[list[int]]  # two lists: the number of tokens sent to each rank, and the number received from each rank


def traffic(deal: Deal, boundaries: np.ndarray, rank: int, window: int | None) -> Traffic:
    """Returns the traffic of `rank`. The host computes it from document boundaries, without the GPU.

    boundaries, window: as for causal_ranges.
    """
    start, end = causal_ranges(boundaries, deal.total, window)
    needed = [keys_needed(deal.positions(other), start, end, deal.total) for other in range(deal.ranks)]
    mine, local = deal.positions(rank), deal.local_index()
    held = np.zeros(deal.total, bool)
    held[mine] = True
    sent = [local[np.flatnonzero(need & held)] for need in needed]
    source = deal.owner_of(np.flatnonzero(needed[rank]))
    place = np.empty(len(source), np.int64)
    place[np.argsort(source, kind="stable")] = np.arange(len(source))
    before = np.append(0, needed[rank].cumsum())  # the number of needed keys before each position
    sizes = [[len(tokens) for tokens in sent], np.bincount(source, minlength=deal.ranks).tolist()]
    return Traffic(
        torch.from_numpy(before[start[mine]].astype(np.int32)),
        torch.from_numpy(before[end[mine]].astype(np.int32)),
        _filled(np.concatenate(sent), deal.total),
        _filled(place, deal.total),
        sizes,
    )


def keys_needed(positions: np.ndarray, start: np.ndarray, end: np.ndarray, total: int) -> np.ndarray:
    """Returns which keys of the stream the queries at `positions` see, (total,) bool. It is never empty.

    start, end: (total,), the key range of each query of the stream, from causal_ranges.
    """
    # The key ranges of neighbouring queries overlap or touch, so consecutive queries together see one contiguous range.
    first = np.append(True, np.diff(positions) != 1)
    last = np.append(first[1:], True)
    opened = np.zeros(total + 1, np.int64)
    np.add.at(opened, start[positions[first]], 1)
    np.add.at(opened, end[positions[last]], -1)
    needed = opened[:-1].cumsum() > 0
    if not needed.any():
        needed[positions[0]] = True  # kernels need at least one key, even if all queries come after the last document
    return needed


def _filled(values: np.ndarray, size: int) -> Tensor:
    result = torch.zeros(size, dtype=torch.int32)
    result[: len(values)] = torch.from_numpy(values)
    return result
