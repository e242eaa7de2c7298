"""Rows of documents, and a layout's rows as an endless sequence.

Each epoch shuffles them anew: row i is a function of the seed and i alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from fa_train.data.packing.report import PackingReport

IGNORE_INDEX = -100


class LossMask(Protocol):
    """Which tokens of each document are learnt; item i is (lengths[i],) bool."""

    def __getitem__(self, index: int) -> np.ndarray: ...

    def count(self, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """How many tokens start to stop of a document are learnt, (n,) int64 each."""


class PackableDocuments(Protocol):
    """Documents by index; item i is its tokens, (lengths[i],). loss_mask None: every token is learnt."""

    lengths: np.ndarray
    loss_mask: LossMask | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Row:
    """One row: tokens, labels and positions (seq_len,), and where its documents start, with seq_len at the end."""

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    boundaries: np.ndarray


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
