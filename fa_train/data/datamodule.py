"""Packed micro-batches for Lightning, as a pure function of the seed and of how many came before."""

import dataclasses
import math
import os
import signal
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NotRequired, Protocol, TypedDict, Unpack

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from fa_train.bounds import NonNegativeInt, PositiveInt, Seed
from fa_train.data.mixing import CYCLE, MixedRows, MixReport, Part, interleave, rows_a_cycle
from fa_train.data.packing.balance import deal
from fa_train.data.packing.best_fit import BestFit, LongDocuments
from fa_train.data.packing.concat import IGNORE_INDEX, Batch, Concatenation, PackableDocuments, Row, collate
from fa_train.data.packing.report import Histogram, PackingReport
from fa_train.data.packing.rows import Layout, ShuffledRows
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import HFCorpus, StdlibCorpus, TextCorpus
from fa_train.data.sources.synthetic import SyntheticSource
from fa_train.data.tokens.store import TokenizedCorpus
from fa_train.data.tokens.tokenizer import ByteTokenizer, load_tokenizer

SAMPLED_ROWS = 256  # of which the mean length of a token's document is taken


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


class Report(Protocol):
    """What packing did, of one source or of several."""

    def text(self) -> str: ...

    def metrics(self) -> dict[str, float]: ...

    def charts(self) -> dict[str, Histogram]: ...


class PackedDataModule(L.LightningDataModule):
    """Documents of a corpus, shuffled, packed into rows of seq_len + 1 tokens, batch_size rows a step.

    The rows of step s are the same whatever the number of GPUs and the micro-batch. On resuming, the data goes on at
    trainer.global_step: nothing is saved, nothing can be lost.
    Units: seq_len in tokens; batch_size in rows a step, micro_batch_size in rows at one time on one GPU; val_rows the
    most rows to validate on. document_mask: attention stays within a document; reset_positions: positions restart with
    it; two independent switches. Each step's rows are dealt to micro-batches and ranks by attention's work.
    packing: concat lays shuffled documents end to end, cut where a row ends; best_fit keeps those whole that fit a row
    and pads little. Documents longer than max_doc_len tokens, None being seq_len, are then split, truncated or dropped
    as long_documents says; `packing_report` counts what became of them.
    Raises: ValueError on sizes that are not positive, on a batch that micro-batches do not divide, on unknown names,
    and on a limit to documents' length where packing=concat, which has none.
    """

    def __init__(
        self,
        source: Source | Mixture,
        *,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int,
        max_steps: int,
        seed: int,
        document_mask: bool,
        reset_positions: bool,
        val_rows: int,
        num_workers: int,
        packing: Literal["concat", "best_fit"] = "concat",
        max_doc_len: int | None = None,
        long_documents: LongDocuments = "split",
    ) -> None:
        super().__init__()
        for name, value in dict(
            seq_len=seq_len, max_steps=max_steps, batch_size=batch_size, micro_batch_size=micro_batch_size
        ).items():
            if value < 1:
                raise ValueError(f"{name} must be positive; got {value}")
        if packing not in ("concat", "best_fit"):
            raise ValueError(f"data.packing must be concat or best_fit; got {packing}")
        if packing == "concat" and (max_doc_len is not None or long_documents != "split"):
            raise ValueError(
                "data.packing=concat must have data.max_doc_len=null and data.long_documents=split; "
                f"got {max_doc_len} and {long_documents}"
            )
        self.source = source
        self.sources = source.sources if isinstance(source, Mixture) else {"": source}
        self.seq_len, self.batch_size, self.micro_batch_size = seq_len, batch_size, micro_batch_size
        self.max_steps, self.seed = max_steps, seed
        self.document_mask, self.reset_positions = document_mask, reset_positions
        self.val_rows, self.num_workers = val_rows, num_workers
        self.packing, self.max_doc_len, self.long_documents = packing, max_doc_len, long_documents

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer; needs no data."""
        return self.source.vocab_size

    def accumulation(self, world_size: int) -> int:
        """Micro-batches that each of world_size processes takes a step."""
        steps, rest = divmod(self.batch_size, self.micro_batch_size * world_size)
        if rest or not steps:
            raise ValueError(
                "batch_size must be a multiple of data.micro_batch_size times the number of processes; "
                f"got {self.batch_size}, {self.micro_batch_size} and {world_size}"
            )
        return steps

    def prepare_data(self, workers: int = 1) -> None:
        # one process a node tokenises and plans; the others find the files
        for source in self.sources.values():
            source.prepare(workers)
        for held_out in (False, True):
            self.layouts(held_out=held_out)

    def layouts(self, *, held_out: bool) -> dict[str, Layout]:
        """By source, the rows of the documents for training, or of those for validation, not yet shuffled."""
        return {name: self._layout(source, held_out) for name, source in self.sources.items()}

    def _layout(self, source: Source, held_out: bool) -> Layout:
        documents = source.documents(held_out=held_out)
        if self.packing == "concat":
            return Concatenation(documents, self.seq_len, source.pad_id)
        return BestFit(
            documents,
            self.seq_len,
            source.pad_id,
            max_doc_len=self.max_doc_len,
            long_documents=self.long_documents,
            cache_dir=source.cache_dir,
        )

    def packing_report(self) -> Report:
        """Of the training documents: .text() to print, .metrics() and .charts() for a logger."""
        return self.report(self.layouts(held_out=False))

    def report(self, layouts: Mapping[str, Layout]) -> Report:
        """Of layouts that are there already."""
        reports = {name: self._with_held_out(name, layout.report) for name, layout in layouts.items()}
        if not isinstance(self.source, Mixture):
            [report] = reports.values()
            return report
        shares = self.source.rows_a_cycle / CYCLE
        return MixReport(reports, dict(zip(reports, shares.tolist(), strict=True)), self.max_steps * self.batch_size)

    def _with_held_out(self, name: str, report: PackingReport) -> PackingReport:
        """They are no part of the rows, and would be missed."""
        lengths = self.sources[name].documents(held_out=True).lengths
        return dataclasses.replace(report, documents_held_out=len(lengths), tokens_held_out=int(lengths.sum()))

    def train_dataloader(self) -> DataLoader:
        rows = PackedRows(self, held_out=False, shuffle=True)
        trainer = self._running_trainer()
        accumulation = self.accumulation(trainer.world_size)
        trainer.print(self.report(rows.layouts).text())
        dataset = MicroBatches(
            rows, self.micro_batch_size, trainer.global_rank, trainer.world_size, step_rows=self.batch_size
        )
        done = trainer.global_step * accumulation
        self._count_from(done)
        return self._loader(dataset, From(done, self.max_steps * accumulation))

    def _count_from(self, done: int) -> None:
        """Tells Lightning how many micro-batches are behind the run, by which it knows where steps and runs end.

        Its own count is the checkpoint's, of a run that may have taken more or fewer a step.
        """
        progress = self._running_trainer().fit_loop.epoch_loop.batch_progress
        state = progress.state_dict()
        for counts in (state["current"], state["total"]):
            ending = counts["processed"] - counts["completed"]  # 1 where the checkpoint was taken at the end of a step
            counts.update(ready=done, started=done, processed=done, completed=done - ending)
        progress.load_state_dict(state)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        rows = PackedRows(self, held_out=True, shuffle=False)
        if not rows.counted:
            return []
        trainer = self._running_trainer()
        dataset = MicroBatches(rows, self.micro_batch_size, trainer.global_rank, trainer.world_size)
        # every rank has the same number of whole micro-batches, so that no rank waits for another
        return self._loader(dataset, From(0, math.ceil(rows.counted / (self.micro_batch_size * trainer.world_size))))

    def _running_trainer(self) -> L.Trainer:
        assert self.trainer is not None, "Lightning attaches the trainer before it asks for a loader"
        return self.trainer

    def _loader(self, dataset: "MicroBatches", sampler: "From") -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=self._running_trainer().strategy.root_device.type == "cuda",
            persistent_workers=self.num_workers > 0,
            # epochs and deals that are kept cannot be pickled; from Python 3.14 on forking is not the default
            multiprocessing_context="fork" if self.num_workers else None,
            worker_init_fn=leave_signals_to_the_run,
        )


def leave_signals_to_the_run(worker_id: int) -> None:
    """Has a data worker live through a terminal's Ctrl-C and SLURM's SIGTERM, which go to all processes of a run.

    The run still needs it for what it finishes before it saves. Its parent's SIGTERM ends it, as before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # blocked, sigwaitinfo tells who sent it
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class PackedRows:
    """Row i of an endless sequence: epoch after epoch, shuffled anew by (seed, epoch); of a mix, source by source.

    In validation, only the first `counted` rows have labels. Later rows only fill up micro-batches.
    Raises: ValueError where a source has documents to train on, but none has a token that is kept.
    """

    def __init__(self, data: PackedDataModule, *, held_out: bool, shuffle: bool) -> None:
        self.layouts = data.layouts(held_out=held_out)
        self.document_mask, self.reset_positions = data.document_mask, data.reset_positions
        for name, layout in self.layouts.items():
            if not (held_out or layout.n_rows):
                where = f" of data.sources.{name}" if name else ""
                raise ValueError(f"packing must keep a document{where}; it keeps none:\n{layout.report.text()}")
        self.rows: ShuffledRows | MixedRows
        if isinstance(data.source, Mixture):
            # a source's seed is of its name, so that it is shuffled alike whatever it is mixed with
            seeds = [(data.seed, zlib.crc32(name.encode())) if shuffle else None for name in self.layouts]
            parts = [ShuffledRows(layout, seed) for layout, seed in zip(self.layouts.values(), seeds, strict=True)]
            shares = data.source.rows_a_cycle
            # to validate, each row once; where one source has no more, the others go on
            counts = np.array([part.per_epoch for part in parts]) if held_out else shares
            self.rows = MixedRows(parts, interleave(counts, shares))
        else:
            [layout] = self.layouts.values()
            self.rows = ShuffledRows(layout, (data.seed,) if shuffle else None)
        self.per_epoch = self.rows.per_epoch
        self.counted = min(data.val_rows, self.per_epoch) if held_out else None  # None: all of them
        self.max_documents = self.rows.max_documents if data.document_mask else 1
        self.mean_seqlen = self._mean_seqlen(data.seq_len)
        self.deal = lru_cache(maxsize=2)(self._deal)  # once a step, not at each of its micro-batches

    def batch(self, first: int, count: int) -> Batch:
        """Rows first to first + count, end to end."""
        return self.gather(range(first, first + count))

    def gather(self, indices: Sequence[int]) -> Batch:
        """These rows, end to end."""
        packed = [self._row(index) for index in indices]
        return collate(
            packed, self.max_documents, self.mean_seqlen, document_mask=self.document_mask,
            reset_positions=self.reset_positions,
        )  # fmt: skip

    def _row(self, index: int) -> Row:
        row = self.rows.row(index)
        if self.counted is None or index < self.counted:
            return row
        return dataclasses.replace(row, labels=np.full_like(row.labels, IGNORE_INDEX))

    def _mean_seqlen(self, seq_len: int) -> int:
        """Tokens of the document that a token is in, by the first rows: one number in all steps and on all ranks.

        Attention chooses kernels by it, and a compiled model is compiled for one choice.
        """
        rows = range(min(self.per_epoch, SAMPLED_ROWS))
        if not self.document_mask or not rows:
            return seq_len
        return round(sum(self.rows.cost(index) for index in rows) / len(rows) / seq_len)

    def _deal(self, first: int, count: int, size: int, world_size: int) -> np.ndarray:
        """Rows first to first + count as (accumulation, world_size, size): which each rank takes when.

        Balanced by their costs; in their own order, ranks taking turns, where all cost the same, as they do without
        the document mask.
        """
        indices = np.arange(first, first + count)
        if self.document_mask:
            costs = np.array([self.rows.cost(index) for index in indices.tolist()])
            if costs.min() != costs.max():
                return indices[deal(costs, size, world_size)]
        return indices.reshape(-1, world_size, size)


class MicroBatches(Dataset[Batch]):
    """Micro-batch i of one rank. Its rows come from the step_rows of its step, whatever the number of ranks.

    step_rows None deals every round of the ranks by itself, as validation does.
    """

    def __init__(
        self, rows: PackedRows, size: int, rank: int, world_size: int, *, step_rows: int | None = None
    ) -> None:
        self.rows, self.size, self.rank, self.world_size = rows, size, rank, world_size
        self.step_rows = size * world_size if step_rows is None else step_rows

    def __getitem__(self, index: int) -> Batch:
        step, turn = divmod(index, self.step_rows // (self.size * self.world_size))
        dealt = self.rows.deal(step * self.step_rows, self.step_rows, self.size, self.world_size)
        indices = dealt[turn, self.rank].tolist()
        return {**self.rows.gather(indices), "first_row": indices[0]}


class From(Sampler[int]):
    """The indices start to stop. Its length counts those before start too: Lightning compares it with all batches
    of the run, and on resuming those are behind it."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop


class PackingOptions(TypedDict):
    """What every kind of data has: PackedDataModule's own arguments."""

    seq_len: PositiveInt
    batch_size: PositiveInt
    micro_batch_size: PositiveInt
    max_steps: PositiveInt
    seed: Seed
    document_mask: bool
    reset_positions: bool
    val_rows: NonNegativeInt
    num_workers: NonNegativeInt
    packing: NotRequired[Literal["concat", "best_fit"]]
    max_doc_len: NotRequired[PositiveInt | None]
    long_documents: NotRequired[LongDocuments]


def stdlib_data(cache_dir: str | None, **packing: Unpack[PackingOptions]) -> PackedDataModule:
    """Python's standard library source, byte by byte."""
    return PackedDataModule(TokenizedCorpus(StdlibCorpus(), ByteTokenizer(), cache_dir), **packing)


def text_data(
    path: str, text_column: str, tokenizer: str | None, cache_dir: str | None, **packing: Unpack[PackingOptions]
) -> PackedDataModule:
    """Files of text; tokenizer is a Hugging Face name or folder, None for bytes."""
    corpus = TextCorpus(path, text_column)
    return PackedDataModule(TokenizedCorpus(corpus, load_tokenizer(tokenizer), cache_dir), **packing)


def hf_data(
    name: str,
    config: str | None,
    split: str,
    text_column: str,
    tokenizer: str | None,
    cache_dir: str | None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """A Hugging Face dataset; tokenizer is a Hugging Face name or folder, None for bytes."""
    corpus = HFCorpus(name, config, split, text_column)
    return PackedDataModule(TokenizedCorpus(corpus, load_tokenizer(tokenizer), cache_dir), **packing)


def sft_data(
    path: str,
    tokenizer: str | None,
    chat_template: str | None,
    cache_dir: str | None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Files of chats, of which the assistant's turns are learnt; chat_template is a file of Jinja or None."""
    loaded = load_tokenizer(tokenizer)  # before files are read
    return PackedDataModule(TokenizedCorpus(ChatCorpus(path), loaded, cache_dir, chat_template), **packing)


def mix_data(
    sources: Mapping[str, Part],
    tokenizer: str | None,
    chat_template: str | None,
    cache_dir: str | None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Several corpora by weight, with one tokenizer."""
    loaded = load_tokenizer(tokenizer)
    weights = {name: part.weight for name, part in sources.items()}
    corpora = {name: TokenizedCorpus(part.corpus, loaded, cache_dir, chat_template) for name, part in sources.items()}
    return PackedDataModule(Mixture(corpora, weights), **packing)


def synthetic_data(
    vocab_size: PositiveInt, document_len: PositiveInt, **packing: Unpack[PackingOptions]
) -> PackedDataModule:
    """Random tokens, for benchmarks."""
    return PackedDataModule(SyntheticSource(vocab_size, document_len), **packing)
