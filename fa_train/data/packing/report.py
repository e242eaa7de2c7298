"""Reports how the documents and tokens of a corpus were packed. Every document and every token is counted."""

from dataclasses import asdict, dataclass

import numpy as np

Histogram = tuple[tuple[int, int], ...]  # pairs (maximum length, number of documents), see `length_histogram`


@dataclass(frozen=True)
class LabelCounts:
    """Counts of labels in a corpus with a loss mask. The mask selects the tokens that are labels.

    labels_in, labels_packed: the number of labels before and after documents are truncated or dropped.
    pieces_unlearned: the number of packed pieces (documents or parts of documents) without labels. The model learns
    nothing from pieces without labels, although they cost time.
    """

    labels_in: int
    labels_packed: int
    pieces_unlearned: int


@dataclass(frozen=True)
class PackingReport:
    """Counts of documents, tokens and rows of an epoch.

    tokens_in = tokens_packed + tokens_truncated + tokens_dropped. documents_split is None if the number of split
    documents depends on the epoch.
    documents_long: the number of documents longer than max_doc_len tokens. With packing=concat, max_doc_len is seq_len.
    held_out: the report on the held-out documents, or None if unknown. No other field counts held-out documents.
    held_out_tail: whether the end of the longest document is held out, instead of whole documents.
    histogram: the result of `length_histogram`.
    rows_skipped: the number of rows of the whole corpus that were skipped as invalid documents, or None if unknown.
    files: a text that says how many files of the whole corpus were read and how many were skipped, or None if the
    corpus does not come from files.
    warnings: warnings about the chat template and the files of the corpus.
    """

    packing: str
    documents: int
    documents_empty: int
    documents_split: int | None
    documents_truncated: int
    documents_dropped: int
    documents_long: int
    max_doc_len: int
    tokens_in: int
    tokens_packed: int
    tokens_truncated: int
    tokens_dropped: int
    rows: int
    seq_len: int
    histogram: Histogram
    labels: LabelCounts | None = None  # None if the model is trained on all tokens
    held_out: "PackingReport | None" = None
    held_out_tail: bool = False
    rows_skipped: int | None = None
    files: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def efficiency(self) -> float:
        """The fraction of positions in the rows that hold tokens. The other positions hold padding."""
        # min is needed because the last token of a concatenation is only a label, and takes no position in a row
        return min(1.0, self.tokens_packed / (self.rows * self.seq_len)) if self.rows else 0.0

    def metrics(self) -> dict[str, float]:
        """Returns scalars for a logger, as {name: value}, with one scalar for each entry of the length histogram."""
        fields = (
            "documents", "documents_empty", "documents_split", "documents_truncated", "documents_dropped",
            "tokens_in", "tokens_packed", "tokens_truncated", "tokens_dropped", "rows_skipped", "rows", "seq_len",
        )  # fmt: skip
        counts = {f"packing/{name}": getattr(self, name) for name in fields if getattr(self, name) is not None}
        lengths = {f"packing/documents_up_to_{longest}": count for longest, count in self.histogram}
        labels = {f"packing/{name}": count for name, count in asdict(self.labels).items()} if self.labels else {}
        return {**counts, **self._held_out_metrics(), "packing/efficiency": self.efficiency, **labels, **lengths}

    def _held_out_metrics(self) -> dict[str, float]:
        """Returns counts of the held-out documents, for example packing/held_out_documents_dropped."""
        if self.held_out is None:
            return {}
        counts = {
            "packing/documents_held_out": self.held_out.documents,
            "packing/tokens_held_out": self.held_out.tokens_in,
        }
        names = "documents_split", "documents_truncated", "documents_dropped", "labels_in", "labels_packed"
        metrics = self.held_out.metrics()
        fates = {f"packing/held_out_{x}": metrics[f"packing/{x}"] for x in names if f"packing/{x}" in metrics}
        return {**counts, **fates}

    def charts(self) -> dict[str, Histogram]:
        """Returns histograms for a logger, as {name: histogram}."""
        return {"packing/document_lengths": self.histogram}

    def text(self) -> str:
        """Returns the report as lines of text."""
        split = "cut at the ends of rows" if self.documents_split is None else f"{self.documents_split:,} split"
        widest = max((count for _, count in self.histogram), default=0)
        return "\n".join(
            [
                f"packing {self.packing}: {self.rows:,} rows of {self.seq_len:,} tokens, {self.efficiency:.2%} full",
                *([f"  files: {self.files}"] if self.files else []),
                f"  documents {self.documents:,}: {self.documents_empty:,} empty, {split}, "
                f"{self.documents_truncated:,} truncated, {self.documents_dropped:,} dropped",
                f"  tokens {self.tokens_in:,}: {self.tokens_packed:,} packed, {self.tokens_truncated:,} truncated, "
                f"{self.tokens_dropped:,} dropped",
                *self._label_lines(),
                *(f"  warning: {warning}" for warning in self.warnings),
                *self._held_out_lines(),
                *([f"  skipped {self.rows_skipped:,} rows that are not valid chats"] if self.rows_skipped else []),
                "  document lengths:",
                *(
                    f"  {'≤ ' + format(longest, ','):>13} {count:>11,} {'█' * -(-30 * count // widest)}"
                    for longest, count in self.histogram
                ),
            ]
        )

    def _held_out_lines(self) -> list[str]:
        if self.held_out is None:
            return []
        what = f"{self.held_out.documents:,} documents, {self.held_out.tokens_in:,} tokens"
        if self.held_out_tail:
            what = f"the last {self.held_out.tokens_in:,} tokens of the longest document"
        fates = ("split", "truncated", "dropped")
        counts = [getattr(self.held_out, f"documents_{fate}") or 0 for fate in fates]
        cut = ", ".join(f"{count:,} {fate}" for count, fate in zip(counts, fates, strict=True))
        return [
            f"  held out for validation: {what}" + (f"; documents: {cut}" if any(counts) else ""),
            *self.held_out._label_lines("held-out "),
        ]

    def _label_lines(self, which: str = "") -> list[str]:
        """Returns lines about the labels of chats.

        which: a text that is put before the words "labels" and "chats" in the lines, for example "held-out ".
        """
        if self.labels is None:
            return []
        lost = self.labels.labels_in - self.labels.labels_packed
        lines = [
            f"  {which}labels {self.labels.labels_in:,}: {self.labels.labels_packed:,} packed, {lost:,} lost; "
            f"{self.labels.pieces_unlearned:,} documents or pieces without labels"
        ]
        if self.documents_long:
            limit = "seq_len" if self.max_doc_len == self.seq_len else "data.max_doc_len"
            lines.append(
                f"  warning: {self.documents_long:,} of {self.documents:,} {which}chats are longer than "
                f"{limit}={self.max_doc_len}; {self._fate_of_long_chats()}"
            )
        return lines

    def _fate_of_long_chats(self) -> str:
        if self.documents_truncated:
            return "their ends are cut off"
        if self.documents_dropped:
            return "they are dropped"
        return "they are split, and a part does not see the parts before it"


def run_line(max_steps: int, batch_size: int, rows: int) -> str:
    """Returns a line of text about the length of a run. rows: the number of rows of an epoch."""
    total = max_steps * batch_size
    return (
        f"this run: {max_steps:,} steps of {batch_size:,} rows, {total:,} rows, {total / rows:,.2f} epochs "
        f"(an epoch has {rows / batch_size:,.1f} steps)"
    )


def length_histogram(lengths: np.ndarray) -> Histogram:
    """Returns a histogram of document lengths, with one entry (longest, documents) per power of two.

    An entry counts the documents that have more than `longest / 2` tokens, but at most `longest`. An empty document
    counts as a document of one token.
    """
    if not len(lengths):
        return ()
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(exponents)
    return tuple((2**i, int(counts[i])) for i in range(int(exponents.min()), len(counts)))


def require_same_documents(own: dict[str, float], of_rank_zero: dict[str, float], rank: int) -> None:
    """Checks that a rank has packed the same documents as rank 0. Otherwise, rows would be missing or repeated.

    own: the metrics of this rank's report. of_rank_zero: the metrics of rank 0's report.
    Raises: ValueError if the metrics differ.
    """
    for name in own | of_rank_zero:
        found, expected = own.get(name), of_rank_zero.get(name)
        if found != expected:
            raise ValueError(
                f"all ranks must read the same documents; got {name}={found} on rank {rank} and {expected} on rank 0. "
                "The files of the data may differ between machines"
            )
