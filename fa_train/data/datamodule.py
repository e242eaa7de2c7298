"""Packed micro-batches for Lightning, as a pure function of the seed and of how many came before."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NotRequired, Protocol, TypedDict, Unpack

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from fa_train.data.balance import deal
from fa_train.data.best_fit import BestFit, LongDocuments
from fa_train.data.corpus import HFCorpus, StdlibCorpus, TextCorpus
from fa_train.data.packing import Batch, Concatenation, PackableDocuments, Row, collate
from fa_train.data.report import PackingReport
from fa_train.data.store import TokenizedCorpus
from fa_train.data.synthetic import SyntheticSource
from fa_train.data.tokenizer import ByteTokenizer, load_tokenizer


class Source(Protocol):
    """Where a data module's documents come from."""

    vocab_size: int
    pad_id: int

    @property
    def cache_dir(self) -> Path | None:
        """Where packing's plans are kept; None keeps none."""

    def documents(self, *, held_out: bool) -> PackableDocuments:
        """Those for training, or those for validation."""


class Layout(Protocol):
    """How documents are laid into rows: Concatenation or BestFit."""

    n_rows: int
    max_documents: int
    report: PackingReport

    @property
    def row_costs(self) -> np.ndarray | None:
        """Of attention, by row, (n_rows,), where rows are worth balancing."""

    def epoch(self, generator: np.random.Generator | None) -> Callable[[int], Row]:
        """Row i of an epoch, with documents shuffled by the generator where the layout lets them be."""


class PackedDataModule(L.LightningDataModule):
    """Documents of a corpus, shuffled, packed into rows of seq_len + 1 tokens, batch_size rows a step.

    The rows of step s are the same whatever the number of GPUs and the micro-batch. On resuming, the data goes on at
    trainer.global_step: nothing is saved, nothing can be lost.
    Units: seq_len in tokens; batch_size in rows a step, micro_batch_size in rows at one time on one GPU; val_rows the
    most rows to validate on. document_mask: attention stays within a document; reset_positions: positions restart with
    it; two independent switches. packing: concat lays shuffled documents end to end, cut where a row ends; best_fit
    keeps those whole that fit a row, pads little, and deals each step's rows to micro-batches and ranks by attention's
    work. Documents longer than max_doc_len tokens, None being seq_len, are then split, truncated or dropped as
    long_documents says; `packing_report` counts what became of them.
    Raises: ValueError on sizes that are not positive, on a batch that micro-batches do not divide, on unknown names,
    and on a limit to documents' length where packing=concat, which has none.
    """

    def __init__(
        self,
        source: Source,
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

    def prepare_data(self) -> None:
        # one process a node tokenises and plans; the others find the files
        for held_out in (False, True):
            self.layout(held_out=held_out)

    def layout(self, *, held_out: bool) -> Layout:
        """The rows of the documents for training, or of those for validation, not yet shuffled."""
        documents = self.source.documents(held_out=held_out)
        if self.packing == "concat":
            return Concatenation(documents, self.seq_len, self.source.pad_id)
        return BestFit(
            documents,
            self.seq_len,
            self.source.pad_id,
            max_doc_len=self.max_doc_len,
            long_documents=self.long_documents,
            cache_dir=self.source.cache_dir,
        )

    def packing_report(self) -> PackingReport:
        """Of the training documents: .text() to print, .metrics() for a logger."""
        return self.layout(held_out=False).report

    def train_dataloader(self) -> DataLoader:
        rows = PackedRows(self, held_out=False, shuffle=True)
        trainer = self._running_trainer()
        accumulation = self.accumulation(trainer.world_size)
        trainer.print(rows.layout.report.text())
        dataset = MicroBatches(
            rows, self.micro_batch_size, trainer.global_rank, trainer.world_size, step_rows=self.batch_size
        )
        sampler = From(trainer.global_step * accumulation, self.max_steps * accumulation)
        return self._loader(dataset, sampler)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        rows = PackedRows(self, held_out=True, shuffle=False)
        trainer = self._running_trainer()
        # whole micro-batches on every rank, so that no rank waits for another
        count = min(self.val_rows, rows.per_epoch) // (self.micro_batch_size * trainer.world_size)
        if not count:
            return []
        dataset = MicroBatches(rows, self.micro_batch_size, trainer.global_rank, trainer.world_size)
        return self._loader(dataset, From(0, count))

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
        )


class PackedRows:
    """Row i of an endless sequence: epoch after epoch, shuffled anew by (seed, epoch).

    Raises: ValueError where there are documents to train on, but none has a token that is kept.
    """

    def __init__(self, data: PackedDataModule, *, held_out: bool, shuffle: bool) -> None:
        self.layout = data.layout(held_out=held_out)
        self.seed, self.shuffle = data.seed, shuffle
        self.document_mask, self.reset_positions = data.document_mask, data.reset_positions
        self.per_epoch = self.layout.n_rows
        if not (held_out or self.per_epoch):
            raise ValueError(f"packing must keep a document; it keeps none:\n{self.layout.report.text()}")
        self.max_documents = self.layout.max_documents if data.document_mask else 1
        # without the mask every row costs the same
        self.row_costs = self.layout.row_costs if data.document_mask else None
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[Callable[[int], Row], np.ndarray]:
        """The rows of an epoch, and their order."""
        generator = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
        pack, order = self.layout.epoch(generator), np.arange(self.per_epoch)
        if generator is not None:
            generator.shuffle(order)
        return pack, order

    def batch(self, first: int, count: int) -> Batch:
        """Rows first to first + count, end to end."""
        return self.gather(range(first, first + count))

    def gather(self, indices: Sequence[int]) -> Batch:
        """These rows, end to end."""
        packed = []
        for index in indices:
            epoch, place = divmod(index, self.per_epoch)
            pack, order = self._epoch(epoch)
            packed.append(pack(int(order[place])))
        return collate(
            packed, self.max_documents, document_mask=self.document_mask, reset_positions=self.reset_positions
        )

    def deal(self, first: int, count: int, size: int, world_size: int) -> np.ndarray:
        """Rows first to first + count as (accumulation, world_size, size): which each rank takes when.

        Balanced by their costs; in their own order, ranks taking turns, where rows have none.
        """
        indices = np.arange(first, first + count)
        if self.row_costs is None:
            return indices.reshape(-1, world_size, size)
        rows = [self._epoch(epoch)[1][place] for epoch, place in (divmod(i, self.per_epoch) for i in indices.tolist())]
        return indices[deal(self.row_costs[rows], size, world_size)]


class MicroBatches(Dataset[Batch]):
    """Micro-batch i of one rank. Its rows come from the step_rows of its step, whatever the number of ranks.

    step_rows None deals row by row in order, every round of the ranks by itself, as validation does.
    """

    def __init__(
        self, rows: PackedRows, size: int, rank: int, world_size: int, *, step_rows: int | None = None
    ) -> None:
        self.rows, self.size, self.rank, self.world_size = rows, size, rank, world_size
        self.step_rows = size * world_size if step_rows is None else step_rows

    def __getitem__(self, index: int) -> Batch:
        step, turn = divmod(index, self.step_rows // (self.size * self.world_size))
        dealt = self.rows.deal(step * self.step_rows, self.step_rows, self.size, self.world_size)
        return self.rows.gather(dealt[turn, self.rank].tolist())


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

    seq_len: int
    batch_size: int
    micro_batch_size: int
    max_steps: int
    seed: int
    document_mask: bool
    reset_positions: bool
    val_rows: int
    num_workers: int
    packing: NotRequired[Literal["concat", "best_fit"]]
    max_doc_len: NotRequired[int | None]
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


def synthetic_data(vocab_size: int, document_len: int, **packing: Unpack[PackingOptions]) -> PackedDataModule:
    """Random tokens, for benchmarks."""
    return PackedDataModule(SyntheticSource(vocab_size, document_len), **packing)
