"""A layout's rows as an endless sequence, shuffled anew each epoch: row i is a function of the seed and i alone."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from fa_train.data.packing.concat import Row
from fa_train.data.packing.report import PackingReport


class Epoch(Protocol):
    """The rows of an epoch, not yet shuffled."""

    def row(self, index: int) -> Row: ...

    def cost(self, index: int) -> int:
        """Attention's work in a row: the sum of its documents' squared lengths, padding as one more."""


class Layout(Protocol):
    """How documents are laid into rows: Concatenation or BestFit."""

    n_rows: int
    max_documents: int
    report: PackingReport

    def epoch(self, generator: np.random.Generator | None) -> Epoch:
        """Its rows, with documents shuffled by the generator where the layout lets them be."""


class ShuffledRows:
    """Row i of an endless sequence: epoch after epoch, shuffled by (*seed, epoch); seed None shuffles nothing."""

    def __init__(self, layout: Layout, seed: tuple[int, ...] | None) -> None:
        self.layout, self.seed = layout, seed
        self.per_epoch, self.max_documents = layout.n_rows, layout.max_documents
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Epoch, np.ndarray]:
        """The rows of an epoch, and their order."""
        generator = None if self.seed is None else np.random.default_rng((*self.seed, epoch))
        rows, order = self.layout.epoch(generator), np.arange(self.per_epoch)
        if generator is not None:
            generator.shuffle(order)
        return rows, order

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, self.per_epoch)
        rows, order = self._epoch(epoch)
        return rows.row(int(order[place]))

    def cost(self, index: int) -> int:
        """Of the row's attention."""
        epoch, place = divmod(index, self.per_epoch)
        rows, order = self._epoch(epoch)
        return rows.cost(int(order[place]))
