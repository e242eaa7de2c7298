"""Mixes the rows of several sources by weight.

The share of a source is its weight divided by the sum of all weights. In every range of consecutive rows, each source
has nearly its share of the rows. Shares are fractions of rows, not of tokens, and rows can contain padding.
`MixReport` also gives each source's share of the tokens that are not padding. An epoch of a source contains each row of
this source once, in shuffled order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fa_train.bounds import NonEmptyText, PositiveFloat
from fa_train.data.packing.report import Histogram, PackingReport
from fa_train.data.packing.rows import Epoch, PackableDocuments, ShuffledRows, index_in_group
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import Corpus, HFCorpus, TextCorpus

CYCLE = 10_000  # the order of sources repeats after this number of rows, so shares are multiples of `1 / CYCLE`


@dataclass(frozen=True)
class WeightedCorpus:
    """A corpus in a mixture, and its weight."""

    corpus: Corpus
    weight: float


def text_part(path: NonEmptyText | Path, text_column: str, weight: PositiveFloat) -> WeightedCorpus:
    """Returns a corpus of text files with its weight in a mixture."""
    return WeightedCorpus(TextCorpus(path, text_column), weight)


def hf_part(
    name: NonEmptyText, config: str | None, split: str, text_column: str, weight: PositiveFloat
) -> WeightedCorpus:
    """Returns a Hugging Face dataset with its weight in a mixture."""
    return WeightedCorpus(HFCorpus(name, config, split, text_column), weight)


def sft_part(path: NonEmptyText | Path, weight: PositiveFloat, skip_invalid: bool = False) -> WeightedCorpus:
    """Returns a corpus of chats with its weight in a mixture."""
    return WeightedCorpus(ChatCorpus(path, skip_invalid), weight)


def rows_a_cycle(weights: Mapping[str, float]) -> np.ndarray:
    """Returns how many of `CYCLE` rows come from each source, (n_sources,) int64.

    Shares are rounded to whole rows with the largest-remainder method.
    Raises: ValueError if there is no source, a weight is not positive, or a source would get no row among `CYCLE` rows.
    """
    if not weights:
        raise ValueError(
            "data.sources must name at least one source; got none. conf/data/mix.yaml shows how to add one"
        )
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"data.sources.{name}.weight must be a positive number; got {weight}")
    exact = np.array(list(weights.values()), float) / sum(weights.values()) * CYCLE
    rows = np.floor(exact).astype(np.int64)
    rows[np.argsort(rows - exact, kind="stable")[: CYCLE - rows.sum()]] += 1
    for (name, weight), count in zip(weights.items(), rows, strict=True):
        if not count:
            raise ValueError(
                f"data.sources.{name}.weight must be at least 1 / {CYCLE} of the sum of all weights; got {weight}"
            )
    return rows


def interleave(counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the source of each row, (sum(counts),) int64. Source i occurs counts[i] times.

    As long as every source has rows left, each source's share of the rows is proportional to its weight.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    return source[np.argsort((index_in_group(counts) + 0.5) / weights[source], kind="stable")]


class MixedRows:
    """An endless sequence of rows from several sources.

    order: (per_epoch,) source indices. Row i comes from the source order[i % per_epoch].
    """

    def __init__(self, sources: Sequence[ShuffledRows], order: np.ndarray) -> None:
        self.sources, self.order = sources, order
        self.per_epoch = len(order)
        self._counts = np.bincount(order, minlength=len(sources))
        # for each entry of `order`, the number of earlier entries with the same source
        self._before = np.empty(len(order), np.int64)
        for source, count in enumerate(self._counts):
            self._before[order == source] = np.arange(count)
        self.max_documents = max(source.max_documents for source in sources)

    def locate(self, index: int) -> tuple[Epoch, int]:
        """Returns the epoch that a row belongs to, and the row's index in it. It is an epoch of one source."""
        cycle, position = divmod(index, self.per_epoch)
        source = int(self.order[position])
        return self.sources[source].locate(cycle * int(self._counts[source]) + int(self._before[position]))


@dataclass(frozen=True)
class MixReport:
    """The packing report of each source, and each source's share of the rows.

    total_rows: the number of rows of the whole run.
    """

    reports: Mapping[str, PackingReport]
    row_shares: Mapping[str, float]
    total_rows: int

    def token_share(self, name: str) -> float:
        """Returns a source's share of the tokens that are not padding."""
        filled = {name: share * self.reports[name].efficiency for name, share in self.row_shares.items()}
        return filled[name] / sum(filled.values()) if any(filled.values()) else 0.0

    def epochs(self, name: str) -> float:
        """Returns how many epochs of a source the run reads."""
        rows = self.reports[name].rows
        return self.total_rows * self.row_shares[name] / rows if rows else 0.0

    def metrics(self) -> dict[str, float]:
        """Returns scalars for a logger, as {name: value}."""
        metrics: dict[str, float] = {}
        for name, report in self.reports.items():
            prefix = f"packing/{name}/"
            metrics |= {key.replace("packing/", prefix, 1): value for key, value in report.metrics().items()}
            metrics[f"{prefix}row_share"] = self.row_shares[name]
            metrics[f"{prefix}token_share"] = self.token_share(name)
            metrics[f"{prefix}epochs"] = self.epochs(name)
        return metrics

    def charts(self) -> dict[str, Histogram]:
        """Returns histograms for a logger, as {name: histogram}."""
        return {
            key.replace("packing/", f"packing/{name}/", 1): histogram
            for name, report in self.reports.items()
            for key, histogram in report.charts().items()
        }

    def text(self) -> str:
        """Returns the report as lines of text."""
        return "\n".join(
            f"{name}: {self.row_shares[name]:.2%} of rows, {self.token_share(name):.2%} of tokens, "
            f"{self.epochs(name):.2f} epochs in this run\n{report.text()}"
            for name, report in self.reports.items()
        )


Report = PackingReport | MixReport


class Source(Protocol):
    """The methods and attributes that every source of documents must have."""

    vocab_size: int
    pad_id: int

    @property
    def cache_dir(self) -> Path | None:
        """The folder in which packing plans are cached, or None for no cache."""

    def prepare(self, workers: int = 1) -> object:
        """Prepares the documents, for example by tokenising them. workers: the number of processes."""

    def documents(self, *, held_out: bool) -> PackableDocuments:
        """Returns the training documents, or the documents that are held out for validation."""


class Mixture:
    """Several sources with the same vocabulary, and their weights. Raises: the errors of `rows_a_cycle`."""

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float]) -> None:
        self.sources = sources
        self.rows_a_cycle = rows_a_cycle(weights)
        self.vocab_size = next(iter(sources.values())).vocab_size
