"""Packed micro-batches for Lightning, as a pure function of the seed and of how many came before."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol, TypedDict, Unpack

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from fa_train.data.corpus import HFCorpus, StdlibCorpus, TextCorpus
from fa_train.data.packing import Batch, PackableDocuments, collate, max_documents_in_row, n_rows, pack_row
from fa_train.data.store import TokenizedCorpus
from fa_train.data.synthetic import SyntheticSource
from fa_train.data.tokenizer import ByteTokenizer, load_tokenizer


class Source(Protocol):
    """Where a data module's documents come from."""

    vocab_size: int
    pad_id: int

    def documents(self, *, held_out: bool) -> PackableDocuments:
        """Those for training, or those for validation."""


class PackedDataModule(L.LightningDataModule):
    """Documents of a corpus, shuffled, packed into rows of seq_len + 1 tokens, batch_size rows a step.

    The rows of step s are the same whatever the number of GPUs and the micro-batch. On resuming, the data goes on at
    trainer.global_step: nothing is saved, nothing can be lost.
    Units: seq_len in tokens; batch_size in rows a step, micro_batch_size in rows at one time on one GPU; val_rows the
    most rows to validate on. document_mask: attention stays within a document; reset_positions: positions restart with
    it; two independent switches.
    Raises: ValueError on sizes that are not positive and on a batch that micro-batches do not divide.
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
    ) -> None:
        super().__init__()
        for name, value in dict(
            seq_len=seq_len, max_steps=max_steps, batch_size=batch_size, micro_batch_size=micro_batch_size
        ).items():
            if value < 1:
                raise ValueError(f"{name} must be positive; got {value}")
        self.source = source
        self.seq_len, self.batch_size, self.micro_batch_size = seq_len, batch_size, micro_batch_size
        self.max_steps, self.seed = max_steps, seed
        self.document_mask, self.reset_positions = document_mask, reset_positions
        self.val_rows, self.num_workers = val_rows, num_workers

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
        self.source.documents(held_out=False)  # one process a node tokenises; the others find the file

    def train_dataloader(self) -> DataLoader:
        rows = PackedRows(self, held_out=False, shuffle=True)
        trainer = self._running_trainer()
        accumulation = self.accumulation(trainer.world_size)
        dataset = MicroBatches(rows, self.micro_batch_size, trainer.global_rank, trainer.world_size)
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
    """Row i of an endless sequence: epoch after epoch, documents and rows shuffled anew by (seed, epoch)."""

    def __init__(self, data: PackedDataModule, *, held_out: bool, shuffle: bool) -> None:
        self.documents = data.source.documents(held_out=held_out)
        self.seq_len, self.seed, self.pad_id, self.shuffle = data.seq_len, data.seed, data.source.pad_id, shuffle
        self.document_mask, self.reset_positions = data.document_mask, data.reset_positions
        self.per_epoch = n_rows(int(self.documents.lengths.sum()), data.seq_len)
        self.max_documents = max_documents_in_row(self.documents.lengths, data.seq_len) if data.document_mask else 1
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The order of documents, their running lengths in it, and the order of rows."""
        order, rows = np.arange(len(self.documents)), np.arange(self.per_epoch)
        if self.shuffle:
            generator = np.random.default_rng((self.seed, epoch))
            generator.shuffle(order)
            generator.shuffle(rows)
        return order, np.cumsum(self.documents.lengths[order]), rows

    def batch(self, first: int, count: int) -> Batch:
        """Rows first to first + count, end to end."""
        packed = []
        for index in range(first, first + count):
            epoch, row = divmod(index, self.per_epoch)
            order, ends, rows = self._epoch(epoch)
            packed.append(pack_row(self.documents, order, ends, int(rows[row]), self.seq_len, self.pad_id))
        return collate(
            packed, self.max_documents, document_mask=self.document_mask, reset_positions=self.reset_positions
        )


class MicroBatches(Dataset[Batch]):
    """Micro-batch i of one rank: ranks take turns, so that a step's rows do not depend on how many there are."""

    def __init__(self, rows: PackedRows, size: int, rank: int, world_size: int) -> None:
        self.rows, self.size, self.rank, self.world_size = rows, size, rank, world_size

    def __getitem__(self, index: int) -> Batch:
        return self.rows.batch((index * self.world_size + self.rank) * self.size, self.size)


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
