"""Packed micro-batches for Lightning, as a pure function of the seed and of how many came before."""

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict, Unpack

import lightning as L
from torch.utils.data import DataLoader

from fa_train.bounds import NonNegativeInt, PositiveInt, Seed
from fa_train.data.batches import From, MicroBatches, PackedRows
from fa_train.data.mixing import CYCLE, MixReport, Mixture, Part, Source
from fa_train.data.packing.best_fit import BestFit, LongDocuments
from fa_train.data.packing.concat import Concatenation
from fa_train.data.packing.report import PackingReport, Report
from fa_train.data.packing.rows import Layout
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import HFCorpus, StdlibCorpus, TextCorpus
from fa_train.data.sources.synthetic import SyntheticSource
from fa_train.data.tokens.store import TokenizedCorpus
from fa_train.data.tokens.tokenizer import ByteTokenizer, load_tokenizer


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

    def _loader(self, dataset: MicroBatches, sampler: From) -> DataLoader:
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
