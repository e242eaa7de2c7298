"""A step's rows dealt to micro-batches and ranks so that none waits long for another."""

import heapq

import numpy as np


def deal(costs: np.ndarray, size: int, world_size: int) -> np.ndarray:
    """Which of a step's rows each rank takes when: (accumulation, world_size, size) indices into costs, each once.

    Rows go costliest first to the cheapest micro-batch with a place left. Micro-batches of like cost run at one time,
    as ranks that gather parameters wait for each other at every one; within such a round the costliest goes to the
    rank that has had least. Ties go by index, so the deal is a function of its arguments.
    Source: longest processing time first, Graham 1969, doi:10.1137/0117039; with places for `size` rows each.
    """
    n_micro_batches = len(costs) // size
    assert len(costs) == n_micro_batches * size and n_micro_batches % world_size == 0
    members: list[list[int]] = [[] for _ in range(n_micro_batches)]
    open_micro_batches = [(0, index) for index in range(n_micro_batches)]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, index = heapq.heappop(open_micro_batches)
        members[index].append(row)
        if len(members[index]) < size:
            heapq.heappush(open_micro_batches, (cost + int(costs[row]), index))
    sums = costs[np.array(members)].sum(axis=1)
    rounds = np.argsort(-sums, kind="stable").reshape(-1, world_size)
    dealt = np.empty((len(rounds), world_size, size), np.int64)
    had = np.zeros(world_size, sums.dtype)
    for turn, micro_batches in enumerate(rounds):
        ranks = np.argsort(had, kind="stable")
        dealt[turn, ranks] = [members[index] for index in micro_batches]
        had[ranks] += sums[micro_batches]
    return dealt
