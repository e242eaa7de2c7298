"""Concatenates shuffled documents and cuts them into rows of equal length. No token is lost.

Row r consists of seq_len + 1 tokens of the stream, starting with token r * seq_len. The first seq_len tokens are the
row's inputs. The last seq_len tokens are the row's labels. The last token of a row is also the first token of the next
row. A document's last token has no label, because the next token belongs to another document. If the end of a row cuts
a document, the rest of the document becomes a separate document in the next row. The last row is padded.
"""

from dataclasses import dataclass

import numpy as np

from fa_train.data.packing.report import LabelCounts, PackingReport, length_histogram
from fa_train.data.packing.rows import (
    IGNORE_INDEX,
    LossMask,
    PackableDocuments,
    Row,
    index_in_group,
    labels_of_documents,
)


def n_rows(total_tokens: int, seq_len: int) -> int:
    """Returns the number of rows that `total_tokens` tokens need. The last row may be padded."""
    return max(1, -(-(total_tokens - 1) // seq_len)) if total_tokens else 0


def max_documents_in_row(lengths: np.ndarray, seq_len: int) -> int:
    """Returns an upper limit for the documents in a row, whatever their order. Padding counts as one document."""
    lengths = lengths[lengths > 0]  # empty documents do not appear in rows
    if not (lengths % seq_len).any():
        return 1  # all lengths are multiples of seq_len, so each row holds tokens of only one document
    # A row of the shortest documents holds the largest number of whole documents. Such a row can also hold a part of
    # one document at its start, a part of another document at its end, and padding. Padding counts as one document.
    whole = int(np.searchsorted(np.cumsum(np.sort(lengths)), seq_len + 1, side="right"))
    return min(whole + 3, seq_len)


def row_boundaries(cuts: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns the starts of the documents in a row, followed by seq_len.

    cuts: the starts of all documents except the first, and the start of the padding. Values in `cuts` that are
    at least seq_len are ignored.
    """
    return np.unique(np.concatenate([[0], cuts[cuts < seq_len], [seq_len]]))


@dataclass(frozen=True)
class ConcatenatedEpoch:
    """The documents of one epoch, concatenated in `order`. ends: the cumulative document lengths, (n_documents,)."""

    documents: PackableDocuments
    order: np.ndarray
    ends: np.ndarray
    seq_len: int
    pad_id: int

    def row(self, index: int) -> Row:
        """Returns one row of the stream.

        Positions start at 0 in each document and at the start of the row. Padding is stored as one more document, which
        has no labels.
        """
        begin, end = self._span(index, self.seq_len + 1)
        n_real = end - begin
        first, starts = self._documents_of(begin, end)
        pieces = [
            (int(self.order[place]), slice(max(0, -start), n_real - start)) for place, start in enumerate(starts, first)
        ]
        stream = np.full(self.seq_len + 1, self.pad_id, dtype=np.int64)
        stream[:n_real] = np.concatenate([self.documents[document][span] for document, span in pieces])
        cuts = starts[starts > 0]  # the starts of documents, whose first tokens are not labels
        if n_real <= self.seq_len:
            cuts = np.append(cuts, n_real)
        labels = stream[1:].copy()
        loss_mask = self.documents.loss_mask
        if loss_mask is not None:
            learned = np.concatenate([loss_mask[document][span] for document, span in pieces])
            labels[: n_real - 1][~learned[1:]] = IGNORE_INDEX
        labels[cuts - 1] = IGNORE_INDEX
        labels[n_real:] = IGNORE_INDEX
        boundaries = row_boundaries(cuts, self.seq_len)
        return Row(stream[:-1], labels, index_in_group(np.diff(boundaries)), boundaries)

    def lengths(self, index: int) -> np.ndarray:
        """Returns the length of each document in a row, as `Epoch.lengths` does."""
        begin, end = self._span(index, self.seq_len)
        _, starts = self._documents_of(begin, end)
        return np.diff(row_boundaries(np.append(starts[starts > 0], end - begin), self.seq_len))

    def _span(self, index: int, n_tokens: int) -> tuple[int, int]:
        """Returns the start and the end of a row in the stream.

        The row has n_tokens tokens, or fewer at the end of the stream.
        """
        begin = index * self.seq_len
        return begin, min(begin + n_tokens, int(self.ends[-1]))

    def _documents_of(self, begin: int, end: int) -> tuple[int, np.ndarray]:
        """Finds the n documents that overlap `stream[begin:end]`.

        Returns the first document's index in `order`, and the starts of all n documents relative to `begin`, (n,)
        int64. The first document starts at or before `begin`.
        """
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        before = [0 if first == 0 else self.ends[first - 1]]
        return first, np.concatenate([before, self.ends[first:last]]) - begin


class Concatenation:
    """Rows of concatenated documents. Each epoch shuffles the documents again. The end of a row can cut a document."""

    def __init__(self, documents: PackableDocuments, seq_len: int, pad_id: int) -> None:
        self.documents, self.seq_len, self.pad_id = documents, seq_len, pad_id
        lengths = documents.lengths
        self.n_rows = n_rows(int(lengths.sum()), seq_len)
        self.max_documents = max_documents_in_row(lengths, seq_len)
        self.report = PackingReport(
            packing="concat",
            documents=len(lengths),
            documents_empty=int((lengths == 0).sum()),
            documents_split=None,
            documents_truncated=0,
            documents_dropped=0,
            documents_long=int((lengths > seq_len).sum()),
            max_doc_len=seq_len,
            tokens_in=int(lengths.sum()),
            tokens_packed=int(lengths.sum()),
            tokens_truncated=0,
            tokens_dropped=0,
            rows=self.n_rows,
            seq_len=seq_len,
            histogram=length_histogram(lengths),
            labels=None if documents.loss_mask is None else _count_labels(documents.loss_mask, lengths),
        )

    def epoch(self, generator: np.random.Generator | None) -> ConcatenatedEpoch:
        """Returns the rows of the epoch. If `generator` is given, the documents are first shuffled."""
        order = np.arange(len(self.documents))
        if generator is not None:
            generator.shuffle(order)
        ends = np.cumsum(self.documents.lengths[order])
        return ConcatenatedEpoch(self.documents, order, ends, self.seq_len, self.pad_id)


def _count_labels(loss_mask: LossMask, lengths: np.ndarray) -> LabelCounts:
    counts = labels_of_documents(loss_mask, lengths)  # cutting a document into rows loses no label
    n_labels = int(counts.sum())
    return LabelCounts(
        labels_in=n_labels, labels_packed=n_labels, pieces_unlearned=int(((counts == 0) & (lengths > 0)).sum())
    )
