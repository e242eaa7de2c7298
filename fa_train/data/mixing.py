"""Several sources mixed by weight: rows of each in turn, so that every stretch of rows has nearly the asked shares.

Weights are shares of rows, and rows are all of one length; the report says what share of the tokens that makes. A
source goes through all its rows, shuffled, before it starts over, whatever the others do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fa_train.bounds import PositiveFloat
from fa_train.data.packing.report import Histogram, PackingReport
from fa_train.data.packing.rows import PackableDocuments, Row, ShuffledRows
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import Corpus, HFCorpus, TextCorpus

CYCLE = 10_000  # rows after which the order of the sources repeats; shares are rounded to 1 / CYCLE


@dataclass(frozen=True)
class Part:
    """One corpus of a mix. weight is any positive number; shares are weights over their sum."""

    corpus: Corpus
    weight: float


def text_part(path: str, text_column: str, weight: PositiveFloat) -> Part:
    """Files of text."""
    return Part(TextCorpus(path, text_column), weight)


def hf_part(name: str, config: str | None, split: str, text_column: str, weight: PositiveFloat) -> Part:
    """A Hugging Face dataset."""
    return Part(HFCorpus(name, config, split, text_column), weight)


def sft_part(path: str, weight: PositiveFloat) -> Part:
    """Files of chats."""
    return Part(ChatCorpus(path), weight)


def rows_a_cycle(weights: Mapping[str, float]) -> np.ndarray:
    """How many of CYCLE rows each source gives, by largest remainder, (n_sources,) int64.

    Raises: ValueError on no source, and on a weight that is not positive or gives no row.
    """
    if not weights:
        raise ValueError("data.sources must name at least one source; it names none")
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"data.sources.{name}.weight must be a positive number; got {weight}")
    exact = np.array(list(weights.values()), float) / sum(weights.values()) * CYCLE
    rows = np.floor(exact).astype(np.int64)
    rows[np.argsort(rows - exact, kind="stable")[: CYCLE - rows.sum()]] += 1
    for (name, weight), count in zip(weights.items(), rows, strict=True):
        if not count:
            raise ValueError(f"data.sources.{name}.weight must be at least 1 / {CYCLE} of all weights; got {weight}")
    return rows


def interleave(counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Source i counts[i] times, as evenly as weights ask while all of them last, (sum of counts,) int64."""
    source = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    return source[np.argsort((nth + 0.5) / weights[source], kind="stable")]


class MixedRows:
    """Row i of an endless sequence that takes its rows from several, as `order` says, over and over.

    order: (per_epoch,) the source of each row of a round.
    """

    def __init__(self, sources: Sequence[ShuffledRows], order: np.ndarray) -> None:
        self.sources, self.order = sources, order
        self.per_epoch = len(order)
        self._counts = np.bincount(order, minlength=len(sources))
        self._before = np.empty(len(order), np.int64)  # how many rows of a round are of the same source and earlier
        for source, count in enumerate(self._counts):
            self._before[order == source] = np.arange(count)
        self.max_documents = max(source.max_documents for source in sources)

    def _locate(self, index: int) -> tuple[ShuffledRows, int]:
        turn, place = divmod(index, self.per_epoch)
        source = int(self.order[place])
        return self.sources[source], turn * int(self._counts[source]) + int(self._before[place])

    def row(self, index: int) -> Row:
        source, own_index = self._locate(index)
        return source.row(own_index)

    def cost(self, index: int) -> int:
        """Of the row's attention."""
        source, own_index = self._locate(index)
        return source.cost(own_index)


@dataclass(frozen=True)
class MixReport:
    """What packing did to each source, and its share of rows; total_rows: of the whole run."""

    reports: Mapping[str, PackingReport]
    row_shares: Mapping[str, float]
    total_rows: int

    def token_share(self, name: str) -> float:
        """Of the tokens that are not padding."""
        filled = {name: share * self.reports[name].efficiency for name, share in self.row_shares.items()}
        return filled[name] / sum(filled.values()) if any(filled.values()) else 0.0

    def epochs(self, name: str) -> float:
        """How often the run goes through a source."""
        rows = self.reports[name].rows
        return self.total_rows * self.row_shares[name] / rows if rows else 0.0

    def metrics(self) -> dict[str, float]:
        """Flat numbers for a logger, by name."""
        numbers: dict[str, float] = {}
        for name, report in self.reports.items():
            prefix = f"packing/{name}/"
            numbers |= {key.replace("packing/", prefix, 1): value for key, value in report.metrics().items()}
            numbers[f"{prefix}row_share"] = self.row_shares[name]
            numbers[f"{prefix}token_share"] = self.token_share(name)
            numbers[f"{prefix}epochs"] = self.epochs(name)
        return numbers

    def charts(self) -> dict[str, Histogram]:
        """What a logger may draw, by name."""
        return {
            key.replace("packing/", f"packing/{name}/", 1): histogram
            for name, report in self.reports.items()
            for key, histogram in report.charts().items()
        }

    def text(self) -> str:
        """Lines for a terminal or a log."""
        return "\n".join(
            f"{name}: {self.row_shares[name]:.2%} of rows, {self.token_share(name):.2%} of tokens, "
            f"{self.epochs(name):.2f} epochs in this run\n{report.text()}"
            for name, report in self.reports.items()
        )


class Source(Protocol):
    """Where a data module's documents come from."""

    vocab_size: int
    pad_id: int

    @property
    def cache_dir(self) -> Path | None:
        """Where packing's plans are kept; None keeps none."""

    def prepare(self, workers: int = 1) -> object:
        """Does in so many processes what need be done once before documents are there."""

    def documents(self, *, held_out: bool) -> PackableDocuments:
        """Those for training, or those for validation."""


class Mixture:
    """Several sources with one vocabulary, and their weights. Raises: ValueError on weights that give no row."""

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float]) -> None:
        self.sources = sources
        self.rows_a_cycle = rows_a_cycle(weights)
        first = next(iter(sources.values()))
        self.vocab_size, self.pad_id = first.vocab_size, first.pad_id
