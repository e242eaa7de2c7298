"""Documents into rows of one length, as pure functions: nothing is lost, no label crosses a document.

Shuffled documents are laid end to end. Row r takes the seq_len + 1 tokens from r * seq_len on: inputs are the first
seq_len of them and labels the last, so neighbouring rows share one token and every token but the first is predicted
once. A document cut by the end of a row goes on in another row as a document of its own. The last row is padded.
"""

from dataclasses import dataclass

import numpy as np

from fa_train.data.packing.report import LabelCounts, PackingReport, length_histogram
from fa_train.data.packing.rows import IGNORE_INDEX, LossMask, PackableDocuments, Row


def n_rows(total_tokens: int, seq_len: int) -> int:
    """Rows that a stream of so many tokens fills; the last may be padded."""
    return max(1, -(-(total_tokens - 1) // seq_len))


def max_documents_in_row(lengths: np.ndarray, seq_len: int) -> int:
    """A bound on the documents that touch one row, in whatever order they are laid, padding counted as one."""
    if not (lengths % seq_len).any():
        return 1  # each row lies in one
    # those that lie whole within it are at least as long as equally many of the shortest; two more are cut by its ends
    whole = int(np.searchsorted(np.cumsum(np.sort(lengths)), seq_len + 1, side="right"))
    return min(whole + 3, seq_len)


def pack_row(
    documents: PackableDocuments, order: np.ndarray, ends: np.ndarray, row: int, seq_len: int, pad_id: int
) -> Row:
    """Row `row` of the stream documents[order[0]], documents[order[1]], …, whose running lengths are `ends`.

    Positions restart at each document of the row, and at the row. Padding is a document of its own, without labels.
    """
    begin = row * seq_len
    end = min(begin + seq_len + 1, int(ends[-1]))
    first, starts = documents_of_row(ends, begin, end)
    pieces = [
        (int(order[index]), slice(max(0, -start), end - begin - start)) for index, start in enumerate(starts, first)
    ]
    n_real = end - begin
    stream = np.full(seq_len + 1, pad_id, dtype=np.int64)
    stream[:n_real] = np.concatenate([documents[index][span] for index, span in pieces])
    cuts = starts[starts > 0]  # tokens that begin something new; the label before one is nothing to learn
    if n_real <= seq_len:
        cuts = np.append(cuts, n_real)
    labels = stream[1:].copy()
    if documents.loss_mask is not None:
        learned = np.concatenate([documents.loss_mask[index][span] for index, span in pieces])
        labels[: n_real - 1][~learned[1:]] = IGNORE_INDEX
    labels[cuts - 1] = IGNORE_INDEX
    labels[n_real:] = IGNORE_INDEX
    boundaries = row_boundaries(cuts, seq_len)
    position_ids = np.arange(seq_len) - np.repeat(boundaries[:-1], np.diff(boundaries))
    return Row(stream[:-1], labels, position_ids, boundaries)


def documents_of_row(ends: np.ndarray, begin: int, end: int) -> tuple[int, np.ndarray]:
    """Which documents of a stream with these running lengths have tokens in begin to end.

    The first of them, and where each of them starts, counted from begin: (n,) int64, the first at most 0.
    """
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, end, side="left"))
    before = [0 if first == 0 else ends[first - 1]]
    return first, np.concatenate([before, ends[first:last]]) - begin


def row_boundaries(cuts: np.ndarray, seq_len: int) -> np.ndarray:
    """Where documents begin in a row, with seq_len at the end; a cut at its end begins nothing."""
    return np.unique(np.concatenate([[0], cuts[cuts < seq_len], [seq_len]]))


@dataclass(frozen=True)
class ConcatenatedEpoch:
    """An order of the documents, laid end to end; ends (n_documents,) are their running lengths in it."""

    documents: PackableDocuments
    order: np.ndarray
    ends: np.ndarray
    seq_len: int
    pad_id: int

    def row(self, index: int) -> Row:
        return pack_row(self.documents, self.order, self.ends, index, self.seq_len, self.pad_id)

    def cost(self, index: int) -> int:
        """Attention's work in a row, the sum of squared document lengths, padding as one more; reads no token."""
        begin = index * self.seq_len
        end = min(begin + self.seq_len, int(self.ends[-1]))
        _, starts = documents_of_row(self.ends, begin, end)
        lengths = np.diff(row_boundaries(np.append(starts[starts > 0], end - begin), self.seq_len))
        return int((lengths**2).sum())


class Concatenation:
    """Rows by plain concatenation: documents shuffled anew each epoch, and cut where a row ends."""

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
        """Rows of the documents in an order that the generator shuffles; None keeps their own."""
        order = np.arange(len(self.documents))
        if generator is not None:
            generator.shuffle(order)
        ends = np.cumsum(self.documents.lengths[order])
        return ConcatenatedEpoch(self.documents, order, ends, self.seq_len, self.pad_id)


def _count_labels(loss_mask: LossMask, lengths: np.ndarray) -> LabelCounts:
    # nothing predicts a document's first token; every other is predicted, wherever rows end
    counts = loss_mask.count(np.arange(len(lengths)), np.minimum(1, lengths), lengths)
    n_labels = int(counts.sum())
    return LabelCounts(
        labels_in=n_labels, labels_packed=n_labels, pieces_unlearned=int(((counts == 0) & (lengths > 0)).sum())
    )
