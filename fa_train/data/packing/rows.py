"""Rows of packed documents, and the endless sequence of shuffled rows that training reads.

The order of the rows is different in each epoch. For given data and settings, row i depends only on the seed and i.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from fa_train.data.packing.report import PackingReport

IGNORE_INDEX = -100
# `fingerprint` samples at least 64 documents if there are as many, and at most 1024 tokens of each
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 64, 1024


class LossMask(Protocol):
    """The loss mask of each document. Item i, (lengths[i],) bool, is True for tokens that the model is trained on."""

    def __getitem__(self, index: int) -> np.ndarray: ...

    def count(self, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """For each of n ranges of tokens, returns the number of tokens that the model is trained on.

        Range i has the tokens from start[i] to stop[i] - 1 of the document with the index document[i].
        Shapes: (n,) int64.
        """


class PackableDocuments(Protocol):
    """A sequence of documents. Item i holds the tokens of document i, (lengths[i],).

    loss_mask: the tokens that the model is trained on, or None for all tokens.
    """

    lengths: np.ndarray
    loss_mask: LossMask | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


def fingerprint(documents: PackableDocuments) -> str:
    """Returns a hash of all document lengths, and of the first tokens of at most 127 evenly spaced documents."""
    hashed = hashlib.blake2b(np.ascontiguousarray(documents.lengths, np.int64).data, digest_size=8)
    for index in range(0, len(documents), max(1, len(documents) // SAMPLED_DOCUMENTS)):
        hashed.update(np.ascontiguousarray(documents[index][:SAMPLED_TOKENS], np.int32).data)
    return hashed.hexdigest()


def labels_of_documents(loss_mask: LossMask, lengths: np.ndarray) -> np.ndarray:
    """Returns the number of labels of each document, (n_documents,) int64.

    The first token of a document is not a label, because no token predicts it.
    """
    return loss_mask.count(np.arange(len(lengths)), np.minimum(1, lengths), lengths)


def index_in_group(sizes: np.ndarray) -> np.ndarray:
    """Concatenates the ranges 0, 1, ..., size - 1 of all sizes: the sizes (2, 3) give (0, 1, 0, 1, 2)."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


@dataclass(frozen=True)
class Row:
    """One row of packed documents. Shapes: tokens, labels and position_ids (seq_len,).

    boundaries: the start of each document in the row, followed by seq_len.
    """

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    boundaries: np.ndarray


class Epoch(Protocol):
    """The rows of one epoch, before they are shuffled."""

    def row(self, index: int) -> Row: ...

    def lengths(self, index: int) -> np.ndarray:
        """Returns the length of each document in a row, (n_documents,). Padding is one document. Reads no tokens."""


class Layout(Protocol):
    """The interface of classes that pack documents into rows, such as Concatenation and BestFit.

    Each epoch has n_rows rows. A row has at most max_documents documents. n_rows and max_documents do not depend on the
    order of the documents. ShuffledRows finds a row's epoch by dividing the row's index by n_rows. ShuffledRows
    shuffles the rows of each epoch again.
    """

    documents: PackableDocuments
    n_rows: int
    max_documents: int
    report: PackingReport

    def epoch(self, generator: np.random.Generator | None) -> Epoch:
        """Returns the rows of an epoch. Concatenation first shuffles the documents with the generator."""


class ShuffledRows:
    """An endless sequence of rows, one epoch after another.

    Each epoch is shuffled with the seed (*seed, epoch). If `seed` is None, rows are not shuffled.
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

    def locate(self, index: int) -> tuple[Epoch, int]:
        """Returns the epoch that a row belongs to, and the row's index in this epoch."""
        epoch, place = divmod(index, self.per_epoch)
        rows, order = self._epoch(epoch)
        return rows, int(order[place])
