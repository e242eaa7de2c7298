"""Rows of packed documents, and the endless sequence of shuffled rows that training reads.

Each epoch shuffles the rows again. Row i depends only on the seed and i.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from fa_train.data.packing.report import PackingReport

IGNORE_INDEX = -100


class LossMask(Protocol):
    """Which tokens of each document are trained on. Item i is (lengths[i],) bool."""

    def __getitem__(self, index: int) -> np.ndarray: ...

    def count(self, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Returns how many tokens of document[i][start[i]:stop[i]] are trained on, for each i. Shapes: (n,) int64."""


class PackableDocuments(Protocol):
    """Documents by index. Item i holds the tokens of document i, (lengths[i],). loss_mask None: all are trained on."""

    lengths: np.ndarray
    loss_mask: LossMask | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Row:
    """One row of packed documents. tokens, labels and position_ids: (seq_len,).

    boundaries: where each document starts, followed by seq_len.
    """

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    boundaries: np.ndarray


class Epoch(Protocol):
    """The rows of one epoch, before they are shuffled."""

    def row(self, index: int) -> Row: ...

    def cost(self, index: int) -> int:
        """Returns the cost of attention in a row: the sum of squared document lengths. Padding counts as a document."""


class Layout(Protocol):
    """A way to pack documents into rows: Concatenation or BestFit."""

    n_rows: int
    max_documents: int
    report: PackingReport

    def epoch(self, generator: np.random.Generator | None) -> Epoch:
        """Returns the rows of an epoch. Concatenation shuffles the documents with the generator first."""


class ShuffledRows:
    """An endless sequence of rows, one epoch after another.

    The seed (*seed, epoch) shuffles each epoch. If `seed` is None, rows are not shuffled.
    """

    def __init__(self, layout: Layout, seed: tuple[int, ...] | None) -> None:
        self.layout, self.seed = layout, seed
        self.per_epoch, self.max_documents = layout.n_rows, layout.max_documents
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Epoch, np.ndarray]:
        """Returns the rows of an epoch, and the order in which to read them."""
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
        """Returns the cost of attention in this row (see `Epoch.cost`)."""
        epoch, place = divmod(index, self.per_epoch)
        rows, order = self._epoch(epoch)
        return rows.cost(int(order[place]))
