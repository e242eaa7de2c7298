"""A layout's rows as an endless sequence, shuffled anew each epoch: row i is a function of the seed and i alone."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np

from fa_train.data.packing import Row
from fa_train.data.report import PackingReport


class Layout(Protocol):
    """How documents are laid into rows: Concatenation or BestFit."""

    n_rows: int
    max_documents: int
    report: PackingReport

    @property
    def row_costs(self) -> np.ndarray | None:
        """Of attention, by row, (n_rows,), where rows are worth balancing."""

    def epoch(self, generator: np.random.Generator | None) -> Callable[[int], Row]:
        """Row i of an epoch, with documents shuffled by the generator where the layout lets them be."""


class ShuffledRows:
    """Row i of an endless sequence: epoch after epoch, shuffled by (*seed, epoch); seed None shuffles nothing."""

    def __init__(self, layout: Layout, seed: tuple[int, ...] | None) -> None:
        self.layout, self.seed = layout, seed
        self.per_epoch, self.max_documents = layout.n_rows, layout.max_documents
        self.has_costs = layout.row_costs is not None
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Callable[[int], Row], np.ndarray]:
        """The rows of an epoch, and their order."""
        generator = None if self.seed is None else np.random.default_rng((*self.seed, epoch))
        pack, order = self.layout.epoch(generator), np.arange(self.per_epoch)
        if generator is not None:
            generator.shuffle(order)
        return pack, order

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, self.per_epoch)
        pack, order = self._epoch(epoch)
        return pack(int(order[place]))

    def cost(self, index: int) -> int:
        """Of the row's attention; only where has_costs."""
        assert self.layout.row_costs is not None
        epoch, place = divmod(index, self.per_epoch)
        return int(self.layout.row_costs[self._epoch(epoch)[1][place]])
