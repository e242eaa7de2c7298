"""Best-fit decreasing: packs documents into rows with little padding.

Documents of at most max_doc_len tokens are not cut. Longer documents are first split, truncated or dropped. The pieces
(whole documents, or parts of split and truncated documents) are then placed into rows, longest first. Each piece goes
to the fullest row that still has enough space for it. Pieces of equal length are placed together. The running time
therefore depends on the number of distinct pairs (length, free space), not on the number of documents. Packing reads
only the lengths of documents, not their tokens.
Source: arXiv:2404.10830 ("Fewer Truncations Improve Language Modeling"), Algorithm 1. To find a row for a piece,
Algorithm 1 uses a segment tree. This file uses a sorted list of the distinct amounts of free space.
"""

import hashlib
import os
from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

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
from fa_train.data.tokens.cache import whole_file
from fa_train.errors import is_of_disk

FORMAT = "1"  # the version of the plan's format and of the packing algorithm; the cache key contains this version
LongDocuments = Literal["split", "truncate", "drop"]
ROW, DOCUMENT, START, STOP = range(4)  # columns of a plan


@dataclass(frozen=True)
class Pieces:
    """Documents and parts of documents to pack.

    Piece i consists of the tokens from start[i] to stop[i] - 1 of the document with the index document[i].
    Shapes: (n_pieces,) int64.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def cut_long_documents(lengths: np.ndarray, max_doc_len: int, policy: LongDocuments) -> Pieces:
    """Returns pieces of at most max_doc_len tokens. An empty document has no piece.

    policy: what happens to long documents. With "split", a long document is cut into pieces of max_doc_len tokens and a
    remainder. With "truncate", only the first max_doc_len tokens of a long document are kept. With "drop", long
    documents are dropped.
    """
    if policy == "split":
        counts = -(-lengths // max_doc_len)
    else:
        counts = (lengths > 0) & ((lengths <= max_doc_len) | (policy == "truncate"))
    counts = counts.astype(np.int64)
    document = np.repeat(np.arange(len(lengths)), counts)
    start = index_in_group(counts) * max_doc_len
    return Pieces(document, start, np.minimum(start + max_doc_len, lengths[document]))


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece, (n,) int64. Rows are numbered in the order in which they are opened.

    lengths: the lengths of the pieces, from 1 to capacity tokens. Pieces of equal length are placed in ascending
    order of their indices.
    A row that is the best fit for a piece is also the best fit for the next pieces of the same length. A row with
    `room` free tokens gets up to `room // length` pieces of the same length at once.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    rooms: list[int] = []  # the distinct amounts of free space of all rows, sorted
    rows_by_room: dict[int, list[int]] = {}
    row_of_sorted = array("q")  # an array needs 8 bytes per piece; a list would need about 40 bytes per piece
    n_rows = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                candidates = rows_by_room[room]
            else:
                room = capacity
                n_new = -(-left // (capacity // length))
                candidates = list(range(n_rows + n_new - 1, n_rows - 1, -1))
                n_rows += n_new
                rows_by_room[room] = candidates
                rooms.append(room)
            per_row = room // length
            while left and candidates:
                n_pieces = min(per_row, left)
                row = candidates.pop()
                row_of_sorted.extend([row] * n_pieces)
                left -= n_pieces
                rest = room - n_pieces * length
                if rest:
                    if rest not in rows_by_room:
                        rows_by_room[rest] = []
                        insort(rooms, rest)
                    rows_by_room[rest].append(row)
            if not candidates:
                del rows_by_room[room]
                del rooms[bisect_left(rooms, room)]
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = np.frombuffer(row_of_sorted, np.int64) if row_of_sorted else np.empty(0, np.int64)
    return row_of


def make_plan(lengths: np.ndarray, seq_len: int, max_doc_len: int, policy: LongDocuments) -> np.ndarray:
    """Returns a packing plan, (n_pieces, 4) int64. The columns of a plan are row, document, start and stop.

    Pieces are sorted by row, and by descending length within a row.
    """
    pieces = cut_long_documents(lengths, max_doc_len, policy)
    sizes = pieces.stop - pieces.start
    row = best_fit_decreasing(sizes, seq_len)
    order = np.lexsort((-sizes, row))
    return np.stack([row, pieces.document, pieces.start, pieces.stop], axis=1)[order]


def load_plan(
    lengths: np.ndarray, seq_len: int, max_doc_len: int, policy: LongDocuments, cache_dir: Path | None
) -> np.ndarray:
    """Returns the result of `make_plan`, memory-mapped from cache_dir. Writes the plan if it is not in the cache.

    The file name is a hash of the arguments. The file gets its final name only when it is complete. If the cache is
    read-only and does not contain the plan, the plan is kept in memory.
    cache_dir: the folder of the cache, or None for no cache.
    """
    if cache_dir is None:
        return make_plan(lengths, seq_len, max_doc_len, policy)
    key = hashlib.blake2b(f"{FORMAT}\0{seq_len}\0{max_doc_len}\0{policy}\0".encode(), digest_size=16)
    key.update(np.ascontiguousarray(lengths, dtype="<i8").tobytes())
    path = cache_dir / f"{key.hexdigest()}.plan.npy"
    if not path.exists():
        if cache_dir.exists() and not os.access(cache_dir, os.W_OK):
            return make_plan(lengths, seq_len, max_doc_len, policy)
        with whole_file(path) as unfinished:
            np.save(unfinished, make_plan(lengths, seq_len, max_doc_len, policy))
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        if is_of_disk(error):  # a disk error does not mean that the file is damaged
            raise
        raise ValueError(f"{path} is damaged: {error}. Delete it, and the next run writes it again") from error


def report_plan(
    plan: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    max_doc_len: int,
    policy: LongDocuments,
    loss_mask: LossMask | None = None,
) -> PackingReport:
    """Counts the documents and tokens in a packing plan. Also counts the labels if loss_mask is given."""
    tokens_kept = np.bincount(plan[:, DOCUMENT], plan[:, STOP] - plan[:, START], len(lengths)).astype(np.int64)
    n_pieces = np.bincount(plan[:, DOCUMENT], minlength=len(lengths))
    lost = lengths - tokens_kept
    return PackingReport(
        packing="best_fit",
        documents=len(lengths),
        documents_empty=int((lengths == 0).sum()),
        documents_split=int((n_pieces > 1).sum()),
        documents_truncated=int(((lost > 0) & (n_pieces > 0)).sum()),
        documents_dropped=int(((lost > 0) & (n_pieces == 0)).sum()),
        documents_long=int((lengths > max_doc_len).sum()),
        max_doc_len=max_doc_len,
        tokens_in=int(lengths.sum()),
        tokens_packed=int(tokens_kept.sum()),
        tokens_truncated=int(lost[n_pieces > 0].sum()),
        tokens_dropped=int(lost[n_pieces == 0].sum()),
        rows=int(plan[-1, ROW]) + 1 if len(plan) else 0,
        seq_len=seq_len,
        histogram=length_histogram(lengths),
        labels=None if loss_mask is None else _count_labels(plan, lengths, policy, loss_mask),
    )


def _count_labels(plan: np.ndarray, lengths: np.ndarray, policy: LongDocuments, loss_mask: LossMask) -> LabelCounts:
    document, start, stop = plan[:, DOCUMENT], plan[:, START], plan[:, STOP]
    # in a split document, the last label of a piece is the first token of the next piece
    last = np.minimum(stop + (policy == "split"), lengths[document])
    packed = loss_mask.count(document, start + 1, last)
    return LabelCounts(
        labels_in=int(labels_of_documents(loss_mask, lengths).sum()),
        labels_packed=int(packed.sum()),
        pieces_unlearned=int((packed == 0).sum()),
    )


class BestFit:
    """Rows packed by best-fit decreasing. The rows are the same in every epoch. The caller shuffles the rows.

    max_doc_len: documents of at most max_doc_len tokens are kept whole. None means seq_len.
    If every document is empty or dropped, n_rows is 0.
    Raises: ValueError if max_doc_len is not between 1 and seq_len, or long_documents is unknown.
    """

    def __init__(
        self,
        documents: PackableDocuments,
        seq_len: int,
        pad_id: int,
        *,
        max_doc_len: int | None,
        long_documents: LongDocuments,
        cache_dir: Path | None,
    ) -> None:
        limit = seq_len if max_doc_len is None else max_doc_len
        if not 1 <= limit <= seq_len:
            raise ValueError(f"data.max_doc_len must be null or from 1 to seq_len={seq_len}; got {max_doc_len}")
        if long_documents not in get_args(LongDocuments):
            wanted = ", ".join(get_args(LongDocuments))
            raise ValueError(f"data.long_documents must be one of {wanted}; got {long_documents}")
        self.documents, self.seq_len, self.pad_id = documents, seq_len, pad_id
        # in a split document, the last label of a piece is the first token of the next piece
        self.label_beyond_piece = long_documents == "split"
        self.plan = load_plan(documents.lengths, seq_len, limit, long_documents, cache_dir)
        self.report = report_plan(self.plan, documents.lengths, seq_len, limit, long_documents, documents.loss_mask)
        self.n_rows = self.report.rows
        self.first_piece = np.searchsorted(self.plan[:, ROW], np.arange(self.n_rows + 1))
        sizes = self.plan[:, STOP] - self.plan[:, START]
        running = np.concatenate([[0], np.cumsum(sizes)])[self.first_piece]
        padding = seq_len - np.diff(running)
        self.max_documents = int((np.diff(self.first_piece) + (padding > 0)).max(initial=1))

    def epoch(self, generator: np.random.Generator | None) -> "BestFit":
        """Returns self, because the rows do not depend on the epoch."""
        return self

    def lengths(self, index: int) -> np.ndarray:
        """Returns the length of each document in a row, as `Epoch.lengths` does."""
        pieces = self.plan[self.first_piece[index] : self.first_piece[index + 1]]
        lengths = pieces[:, STOP] - pieces[:, START]
        padding = self.seq_len - lengths.sum()
        return np.append(lengths, padding) if padding else lengths

    def row(self, index: int) -> Row:
        """Returns a row, which holds documents in order of descending length, followed by padding.

        Positions start at 0 in each document, and all positions of padding are 0. Padding is stored as one more
        document, which has no labels.
        """
        tokens = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        boundaries = [0]
        for _, document, start, stop in self.plan[self.first_piece[index] : self.first_piece[index + 1]].tolist():
            span = slice(start, stop + self.label_beyond_piece)
            body = self.documents[document][span]
            begin, size = boundaries[-1], stop - start
            tokens[begin : begin + size] = body[:size]
            targets = labels[begin : begin + len(body) - 1]
            targets[:] = body[1:]
            if self.documents.loss_mask is not None:
                targets[~self.documents.loss_mask[document][span][1:]] = IGNORE_INDEX
            boundaries.append(begin + size)
        n_real = boundaries[-1]
        if n_real < self.seq_len:
            boundaries.append(self.seq_len)
        edges = np.array(boundaries)
        position_ids = index_in_group(np.diff(edges))
        # padding gets only position 0, because padding may be longer than the model's table of learned positions
        position_ids[n_real:] = 0
        return Row(tokens, labels, position_ids, edges)
