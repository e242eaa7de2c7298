"""Assigns the rows of a step to micro-batches and ranks. Balances costs, so that ranks hardly wait for each other."""

import heapq

import numpy as np


def deal(costs: np.ndarray, size: int, world_size: int) -> np.ndarray:
    """Returns the row indices of each micro-batch, (accumulation, world_size, size). Each index occurs once.

    costs: the cost of each row. size: rows per micro-batch.

    The most expensive rows are assigned first. Each row goes to the cheapest micro-batch that still has space. Ranks
    with sharded parameters wait for each other in every micro-batch. Micro-batches of similar cost therefore run at the
    same time on different ranks. In each round, the rank with the lowest total cost so far gets the most expensive
    micro-batch. If costs are equal, the lowest index comes first, so the result is deterministic.
    Source: longest processing time first, Graham 1969, doi:10.1137/0117039. The paper assigns jobs to machines, and a
    machine can take any number of jobs. In `deal`, a micro-batch takes exactly `size` rows.
    """
    n_micro_batches = len(costs) // size
    assert len(costs) == n_micro_batches * size and n_micro_batches % world_size == 0
    members: list[list[int]] = [[] for _ in range(n_micro_batches)]
    open_micro_batches = [(0, index) for index in range(n_micro_batches)]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, index = heapq.heappop(open_micro_batches)
        members[index].append(row)
        if len(members[index]) < size:
            heapq.heappush(open_micro_batches, (cost + costs[row].item(), index))
    sums = costs[np.array(members)].sum(axis=1)
    rounds = np.argsort(-sums, kind="stable").reshape(-1, world_size)
    dealt = np.empty((len(rounds), world_size, size), np.int64)
    had = np.zeros(world_size, sums.dtype)
    for round_index, micro_batches in enumerate(rounds):
        ranks = np.argsort(had, kind="stable")
        dealt[round_index, ranks] = [members[index] for index in micro_batches]
        had[ranks] += sums[micro_batches]
    return dealt
