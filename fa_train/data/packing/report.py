"""What packing did to a corpus: every document and token is in one of these counts."""

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

Histogram = tuple[tuple[int, int], ...]  # (longest, documents)


@dataclass(frozen=True)
class LabelCounts:
    """Counts of the labels of documents in which only some tokens are learnt.

    labels_in - labels_packed were lost with truncated and dropped tokens. pieces_unlearned: documents, or pieces of
    those split, that are packed without any label; they cost time and teach nothing.
    """

    labels_in: int
    labels_packed: int
    pieces_unlearned: int


@dataclass(frozen=True)
class PackingReport:
    """Counts of documents, tokens and rows of an epoch.

    tokens_in = tokens_packed + tokens_truncated + tokens_dropped; those held out for validation are besides, None where
    they are not known. documents_split is None where it depends on the epoch's order. histogram: (longest, documents)
    for each power of two, of documents longer than half of it.
    """

    packing: str
    documents: int
    documents_empty: int
    documents_split: int | None
    documents_truncated: int
    documents_dropped: int
    tokens_in: int
    tokens_packed: int
    tokens_truncated: int
    tokens_dropped: int
    rows: int
    seq_len: int
    histogram: Histogram
    labels: LabelCounts | None = None  # where not every token is learnt
    documents_held_out: int | None = None
    tokens_held_out: int | None = None

    @property
    def efficiency(self) -> float:
        """The share of the rows' tokens that are not padding, 0 to 1."""
        # plain concatenation's last token may be a label only
        return min(1.0, self.tokens_packed / (self.rows * self.seq_len)) if self.rows else 0.0

    def metrics(self) -> dict[str, float]:
        """Flat numbers for a logger, by name; the histogram as one number for each length."""
        fields = (
            "documents", "documents_empty", "documents_split", "documents_truncated", "documents_dropped",
            "tokens_in", "tokens_packed", "tokens_truncated", "tokens_dropped", "documents_held_out",
            "tokens_held_out", "rows", "seq_len",
        )  # fmt: skip
        numbers = {f"packing/{name}": getattr(self, name) for name in fields if getattr(self, name) is not None}
        lengths = {f"packing/documents_up_to_{longest}": count for longest, count in self.histogram}
        labels = {f"packing/{name}": count for name, count in asdict(self.labels).items()} if self.labels else {}
        return {**numbers, "packing/efficiency": self.efficiency, **labels, **lengths}

    def charts(self) -> dict[str, Histogram]:
        """What a logger may draw, by name."""
        return {"packing/document_lengths": self.histogram}

    def text(self) -> str:
        """Lines for a terminal or a log."""
        split = "cut at the ends of rows" if self.documents_split is None else f"{self.documents_split:,} split"
        widest = max((count for _, count in self.histogram), default=0)
        return "\n".join(
            [
                f"packing {self.packing}: {self.rows:,} rows of {self.seq_len:,} tokens, {self.efficiency:.2%} full",
                f"  documents {self.documents:,}: {self.documents_empty:,} empty, {split}, "
                f"{self.documents_truncated:,} truncated, {self.documents_dropped:,} dropped",
                f"  tokens {self.tokens_in:,}: {self.tokens_packed:,} packed, {self.tokens_truncated:,} truncated, "
                f"{self.tokens_dropped:,} dropped",
                *self._label_lines(),
                *self._held_out_lines(),
                "  document lengths:",
                *(
                    f"  {'≤ ' + format(longest, ','):>13} {count:>11,} {'█' * -(-30 * count // widest)}"
                    for longest, count in self.histogram
                ),
            ]
        )

    def _held_out_lines(self) -> list[str]:
        if self.documents_held_out is None:
            return []
        return [f"  held out for validation: {self.documents_held_out:,} documents, {self.tokens_held_out:,} tokens"]

    def _label_lines(self) -> list[str]:
        if self.labels is None:
            return []
        lost = self.labels.labels_in - self.labels.labels_packed
        return [
            f"  labels {self.labels.labels_in:,}: {self.labels.labels_packed:,} packed, {lost:,} lost; "
            f"{self.labels.pieces_unlearned:,} documents or pieces without any"
        ]


def length_histogram(lengths: np.ndarray) -> Histogram:
    """(longest, documents) by powers of two, from the shortest that any document has to the longest.

    The documents of one entry are longer than half of its longest; empty ones are with those of one token.
    """
    if not len(lengths):
        return ()
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(exponents)
    return tuple((2**i, int(counts[i])) for i in range(int(exponents.min()), len(counts)))


class Report(Protocol):
    """What packing did, of one source or of several."""

    def text(self) -> str: ...

    def metrics(self) -> dict[str, float]: ...

    def charts(self) -> dict[str, Histogram]: ...
