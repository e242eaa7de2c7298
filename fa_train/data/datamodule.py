"""Makes packed micro-batches for Lightning. The micro-batches depend only on data, settings, seed and step."""

import dataclasses
import gc
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import lightning as L

from fa_train.bounds import NonEmptyText, NonNegativeFloat, NonNegativeInt, PositiveInt, Seed
from fa_train.checkpoints.architecture import differences
from fa_train.data.batches import (
    ForkingLoader,
    MicroBatches,
    PackedRows,
    RangeSampler,
    TimedLoader,
    leave_signals_to_the_run,
)
from fa_train.data.mixing import CYCLE, MixReport, Mixture, Report, Source, WeightedCorpus
from fa_train.data.packing.best_fit import BestFit, LongDocuments
from fa_train.data.packing.concat import Concatenation
from fa_train.data.packing.report import PackingReport, require_same_documents, run_line
from fa_train.data.packing.rows import Layout, fingerprint
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import HFCorpus, StdlibCorpus, TextCorpus, WithValidation, file_counts
from fa_train.data.sources.synthetic import SyntheticSource
from fa_train.data.tokens.encoding import Encoder, TextEncoder
from fa_train.data.tokens.sft import ChatEncoder, tokenizer_hashes
from fa_train.data.tokens.store import Documents, TokenizedCorpus
from fa_train.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from fa_train.early_checks import micro_batches
from fa_train.models.gpt import GPT
from fa_train.parallel.fsdp import context_ranks

NOTHING_HELD_OUT = "no validation: the data have too few tokens to hold out any of them"


class PackedDataModule(L.LightningDataModule):
    """Shuffles the documents of a corpus and packs them into rows of seq_len tokens and labels.

    The rows of a step do not depend on the number of GPUs or on micro_batch_size. A resumed run continues with the rows
    of step trainer.global_step, so a checkpoint stores only the settings that determine the rows. A resumed run prints
    a warning if the settings that determine the rows have changed. In each step, the rows are distributed so that all
    ranks have similar attention costs.

    seq_len: tokens per row. batch_size: rows per step. micro_batch_size: rows per forward pass on one GPU.
    val_rows: the maximum number of rows in a validation.
    document_mask: whether a token sees only tokens of its own document.
    reset_positions: whether positions start at 0 in each document.
    packing: "concat" concatenates shuffled documents and cuts them at row ends. "best_fit" cuts only documents longer
    than max_doc_len, and pads each row.
    max_doc_len: "best_fit" never cuts documents of up to max_doc_len tokens. The default is seq_len.
    long_documents: whether "best_fit" splits, truncates or drops documents longer than max_doc_len. `packing_report`
    counts the documents that are split, truncated or dropped.
    Raises: ValueError if a size is not positive or an option is unknown. Also raises ValueError if max_doc_len or
    long_documents is set although packing is "concat".
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
                "data.packing=concat needs data.max_doc_len=null and data.long_documents=split; "
                f"got {max_doc_len} and {long_documents}"
            )
        self.source = source
        self.sources = source.sources if isinstance(source, Mixture) else {"": source}
        self.seq_len, self.batch_size, self.micro_batch_size = seq_len, batch_size, micro_batch_size
        self.max_steps, self.seed = max_steps, seed
        self.document_mask, self.reset_positions = document_mask, reset_positions
        self.val_rows, self.num_workers = val_rows, num_workers
        self.packing, self.max_doc_len, self.long_documents = packing, max_doc_len, long_documents
        self._rows_per_epoch: int | None = None  # of the training documents; None until the data are packed
        self._mixed: dict[str, float] = {}  # the entry `sources` of `state_dict`; empty until the data are packed
        self._fingerprints: dict[str, str] = {}  # {name of a source: fingerprint}; empty until the data are packed
        self._resumed: dict[str, Any] = {}  # the state_dict() in the checkpoint that the run resumes from

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size. Reading this property reads no data."""
        return self.source.vocab_size

    @property
    def min_vocab_size(self) -> int:
        """The number of embeddings that a model needs at least (fa_train.data.tokens.tokenizer.HFTokenizer)."""
        return max(getattr(source, "min_vocab_size", source.vocab_size) for source in self.sources.values())

    def accumulation(self, world_size: int, context: int = 1) -> int:
        """Returns the number of micro-batches per step and process.

        context: the number of processes that share their micro-batches.
        Raises: ValueError if batch_size is not a multiple of micro_batch_size * world_size / context.
        """
        return micro_batches(self.batch_size, self.micro_batch_size, world_size, context)

    def prepare_data(self, workers: int = 1) -> None:
        # Lightning calls prepare_data in one process per node. The other processes of the node read the files that this
        # process writes.
        for source in self.sources.values():
            source.prepare(workers)
        for held_out in (False, True):
            self.layouts(held_out=held_out)

    def steps_of(self, epochs: float) -> int:
        """Returns the number of optimizer steps in `epochs` epochs, rounded up. Tokenises the data if necessary.

        Raises: ValueError if the data are a mixture of sources, because sources have epochs of different lengths.
        """
        if isinstance(self.source, Mixture):
            raise ValueError("epochs needs one dataset; got a mixture. Set max_steps instead")
        self.prepare_data()
        rows = PackedRows(self, held_out=False, shuffle=True).per_epoch
        return math.ceil(epochs * rows / self.batch_size)

    def holds_out(self) -> bool:
        """Returns whether a validation has any rows. Tokenises the data if necessary.

        Raises: ValueError if no row of a validation has a label.
        """
        self.prepare_data()
        return bool(PackedRows(self, held_out=True, shuffle=True).counted)

    def layouts(self, *, held_out: bool) -> dict[str, Layout]:
        """Returns {name of a source: layout of its rows}, for the training or the held-out documents."""
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
        """Returns a report on the packing of the documents, as text, metrics and charts."""
        return self.report(self.layouts(held_out=False))

    def report(self, layouts: Mapping[str, Layout]) -> Report:
        """Returns a report on how documents are packed into the rows of the given layouts."""
        reports = {name: self._with_corpus(name, layout.report) for name, layout in layouts.items()}
        if not isinstance(self.source, Mixture):
            [report] = reports.values()
            return report
        shares = self.source.rows_a_cycle / CYCLE
        return MixReport(reports, dict(zip(reports, shares.tolist(), strict=True)), self.max_steps * self.batch_size)

    def _with_corpus(self, name: str, report: PackingReport) -> PackingReport:
        """Returns the report with the packing of held-out documents, the numbers of rows and files, and warnings."""
        source = self.sources[name]
        layout = self._layout(source, held_out=True)
        corpus, encoder = (source.corpus, source.encoder) if isinstance(source, TokenizedCorpus) else (None, None)
        files = None if corpus is None else file_counts(corpus)
        warnings = [
            encoder.end_warning if isinstance(encoder, ChatEncoder) else None,
            corpus.overlap_warning if isinstance(corpus, WithValidation) else None,
        ]
        documents = layout.documents
        return dataclasses.replace(
            report,
            held_out=layout.report,
            held_out_tail=isinstance(documents, Documents) and documents.is_tail,
            rows_skipped=documents.rows_skipped if isinstance(documents, Documents) else None,
            files=None if files is None else files.text(),
            warnings=tuple(filter(None, warnings)),
        )

    def setup(self, stage: str) -> None:
        """Raises: ValueError if a setting of the trainer would repeat rows or change the number of rows of a step.

        Also raises ValueError if the model has fewer embeddings than the rows have tokens or positions.
        """
        trainer = self._running_trainer()
        model = getattr(trainer.lightning_module, "model", None)
        if isinstance(model, GPT):  # otherwise, a GPU would report an index out of range, without a reason
            self._require_embeddings(model)
        if stage != "fit":
            return
        accumulation = self.accumulation(trainer.world_size, context_ranks(trainer.strategy))
        automatic = trainer.lightning_module.automatic_optimization
        if automatic and trainer.accumulate_grad_batches != accumulation:
            raise ValueError(
                f"trainer.accumulate_grad_batches must be {accumulation}, the number of micro-batches per step and "
                f"process for batch_size={self.batch_size}; got {trainer.accumulate_grad_batches}"
            )
        if trainer.max_epochs == 1:  # rows could repeat only in a second epoch
            return
        limit = trainer.limit_train_batches
        if isinstance(limit, int) or limit != 1.0:
            raise ValueError(
                f"trainer.limit_train_batches must be 1.0 unless trainer.max_epochs is 1; got {limit}. To train for "
                "fewer steps, set max_steps of the trainer"
            )
        if not 0 <= trainer.max_steps <= self.max_steps:
            raise ValueError(
                f"trainer.max_steps must be from 0 to {self.max_steps}, the max_steps of the data module; got "
                f"{trainer.max_steps}. More steps would repeat rows. If trainer.max_epochs is 1, any number is allowed"
            )

    def _require_embeddings(self, model: GPT) -> None:
        n_embeddings = model.config.vocab_size
        if n_embeddings < self.min_vocab_size:
            raise ValueError(
                f"the model's vocab_size must be at least the tokenizer's vocabulary, {self.min_vocab_size}; "
                f"got {n_embeddings}"
            )
        for source in self.sources.values():
            if isinstance(source, TokenizedCorpus):
                source.require_embeddings(n_embeddings)
        longest = self.max_doc_len if self.reset_positions else None
        model.require_seq_len(min(self.seq_len, longest or self.seq_len))

    def train_dataloader(self) -> TimedLoader:
        trainer = self._running_trainer()
        model = getattr(trainer.lightning_module, "model", None)
        windows = model.windows if isinstance(model, GPT) else (None,)
        rows = PackedRows(self, held_out=False, shuffle=True, windows=windows)
        accumulation = self.accumulation(trainer.world_size, context_ranks(trainer.strategy))
        report = self.report(rows.layouts)
        trainer.print(report.text())
        if self._rows_per_epoch is None:  # only the first loader: a callback may ask for another on rank 0 only
            require_same_documents(report.metrics(), trainer.strategy.broadcast(report.metrics()), trainer.global_rank)
        self._rows_per_epoch = rows.per_epoch
        self._fingerprints = {name: fingerprint(layout.documents) for name, layout in rows.layouts.items()}
        if isinstance(self.source, Mixture):
            percent = (100 * self.source.rows_a_cycle / CYCLE).tolist()
            self._mixed = {f"{name}.rows": layout.n_rows for name, layout in rows.layouts.items()}
            self._mixed |= {f"{name}.percent": share for name, share in zip(rows.layouts, percent, strict=True)}
        else:  # the report of a mixture contains the epochs of each source
            trainer.print(run_line(self.max_steps, self.batch_size, rows.per_epoch))
        for line in self._changes():
            trainer.print(f"warning: {line}. The rows differ, so documents may be repeated or left out")
        dataset = self._micro_batches(rows, step_rows=self.batch_size)
        done = trainer.global_step * accumulation
        self._count_from(done)
        return self._loader(dataset, RangeSampler(done, self.max_steps * accumulation))

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers of rows, hashes of the tokenizer and the documents, and the settings behind the rows.

        The entry `tokenizer` has hashes of the tokenizer. A resumed run compares them with those of its tokenizer, and
        an export with those of the tokenizer that it writes.
        For a mixture, the entry `sources` has two numbers for each source: its rows per epoch, and its share of all
        rows in percent. For a single source, the entry `sources` is empty.
        The entry `documents` has the `fingerprint` of each source's training documents.
        """
        names = "seed", "seq_len", "packing", "max_doc_len", "long_documents"
        settings = {name: getattr(self, name) for name in names}
        counts = {"rows_per_epoch": self._rows_per_epoch}
        encoders = [source.encoder for source in self.sources.values() if isinstance(source, TokenizedCorpus)]
        hashes = {name: value for encoder in encoders for name, value in tokenizer_hashes(encoder).items()}
        entries = {"settings": settings, "counts": counts, "sources": self._mixed, "tokenizer": hashes}
        return entries | {"documents": self._fingerprints}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _changes(self) -> list[str]:
        """Compares this run's `state_dict` with the checkpoint's `state_dict`, and returns lines that name differences.

        The method compares `settings` and `tokenizer` first, then `counts` (the numbers of rows), `sources` (the
        sources of a mixture) and `documents`. Later entries are compared only if the earlier ones are equal.
        """
        own, stored = self.state_dict(), self._resumed
        settings, counts = (differences("data", own[kind], stored.get(kind)) for kind in ("settings", "counts"))
        settings += differences("data.tokenizer", own["tokenizer"], stored.get("tokenizer"))
        mixed = differences("data.sources", own["sources"], stored.get("sources"))
        others = [
            f"the training documents{f' of data.sources.{name}' if name else ''} are not those of the checkpoint's run"
            for name, hashed in own["documents"].items()
            if hashed != stored.get("documents", {}).get(name, hashed)  # older checkpoints have no such entry
        ]
        return settings or counts or mixed or others

    def _count_from(self, done: int) -> None:
        """Sets Lightning's counters of finished micro-batches to `done`.

        Lightning uses the counters to decide when a step ends and when the run ends. Lightning restores the counters
        from the checkpoint. The run that saved the checkpoint may have had another number of micro-batches per step.
        """
        progress = self._running_trainer().fit_loop.epoch_loop.batch_progress
        state = progress.state_dict()
        for counts in (state["current"], state["total"]):
            # 1 if the checkpoint was saved at the end of a step, and otherwise 0
            ending = counts["processed"] - counts["completed"]
            counts.update(ready=done, started=done, processed=done, completed=done - ending)
        progress.load_state_dict(state)

    def val_dataloader(self) -> TimedLoader | list[TimedLoader]:
        # the rows are shuffled, because packing=best_fit puts the longest documents into the first rows
        rows = PackedRows(self, held_out=True, shuffle=True)
        if rows.counted and rows.counted < rows.per_epoch:
            self._running_trainer().print(f"validation: {rows.counted:,} of {rows.per_epoch:,} rows (data.val_rows)")
        if not rows.counted:
            if self.val_rows:
                self._running_trainer().print(NOTHING_HELD_OUT)
            return []
        dataset = self._micro_batches(rows)
        # All ranks must get the same number of full micro-batches, because a rank without a micro-batch would block the
        # others.
        n_micro_batches = math.ceil(rows.counted / (self.micro_batch_size * dataset.world_size))
        return self._loader(dataset, RangeSampler(0, n_micro_batches))

    def _micro_batches(self, rows: PackedRows, step_rows: int | None = None) -> MicroBatches:
        trainer = self._running_trainer()
        context = context_ranks(trainer.strategy)
        shard = None
        if context > 1:
            model = trainer.lightning_module.model
            assert isinstance(model, GPT)
            shard = model.context_shard
        return MicroBatches(
            rows, self.micro_batch_size, trainer.global_rank, trainer.world_size, step_rows=step_rows,
            context=context, shard=shard,
        )  # fmt: skip

    def _running_trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise ValueError(
                "a data module needs a trainer, such as in trainer.fit(module, data); got none. To read rows without a "
                "trainer, use fa_train.data.batches.PackedRows(data, held_out=False, shuffle=True).batch(0, 1)"
            )
        return self.trainer

    def _loader(self, dataset: MicroBatches, sampler: RangeSampler) -> TimedLoader:
        return ForkingLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=self._running_trainer().strategy.root_device.type == "cuda",
            persistent_workers=self.num_workers > 0,
            # Start methods other than fork would pickle PackedRows, whose lru_cache wrappers cannot be pickled. Python
            # 3.14 does not fork by default.
            multiprocessing_context="fork" if self.num_workers else None,
            worker_init_fn=leave_signals_to_the_run,
        )

    def teardown(self, stage: str) -> None:
        if self.num_workers:
            gc.unfreeze()  # a later run of a sweep must be able to free the objects that ForkingLoader froze

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")  # Lightning calls teardown only at the end of a run that succeeds


class PackingOptions(TypedDict):
    """The arguments of PackedDataModule that all data configs have in common."""

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
    """Returns a data module with the source code of Python's standard library. Each byte is a token."""
    return PackedDataModule(TokenizedCorpus(StdlibCorpus(), TextEncoder(ByteTokenizer()), cache_dir), **packing)


def text_data(
    path: NonEmptyText | Path,
    text_column: str,
    tokenizer: str | None,
    cache_dir: str | None,
    val_path: NonEmptyText | Path | None = None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Returns a data module with text files.

    tokenizer: a folder, a Hugging Face name, or None for bytes as tokens. val_path: the files for validation, or None
    to hold out about 2% of the documents.
    """
    corpus = WithValidation.read(partial(TextCorpus, text_column=text_column), path, val_path)
    return PackedDataModule(TokenizedCorpus(corpus, TextEncoder(load_tokenizer(tokenizer)), cache_dir), **packing)


def hf_data(
    name: NonEmptyText,
    config: str | None,
    split: str,
    text_column: str,
    tokenizer: str | None,
    cache_dir: str | None,
    val_split: NonEmptyText | None = None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Returns a data module with a Hugging Face dataset.

    tokenizer: as in `text_data`. val_split: the split for validation, or None to hold out about 2% of the documents.
    """
    corpus = WithValidation.read(lambda part: HFCorpus(name, config, str(part), text_column), split, val_split, "split")
    return PackedDataModule(TokenizedCorpus(corpus, TextEncoder(load_tokenizer(tokenizer)), cache_dir), **packing)


def sft_data(
    path: NonEmptyText | Path,
    tokenizer: str | None,
    chat_template: str | None,
    cache_dir: str | None,
    val_path: NonEmptyText | Path | None = None,
    skip_invalid: bool = False,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Returns a data module with chats. The model is trained only on the assistant's messages.

    chat_template: a Jinja file, or None for the tokenizer's own template. val_path: as in `text_data`. skip_invalid:
    whether to skip invalid rows, as in `ChatCorpus`, and chats that the template rejects.
    """
    loaded = load_tokenizer(tokenizer)  # load the tokenizer first, so that an error comes before the chats are read
    corpus = WithValidation.read(partial(ChatCorpus, skip_invalid=skip_invalid), path, val_path)
    encoder = ChatEncoder(loaded, chat_template, skip_rejected=skip_invalid)
    return PackedDataModule(TokenizedCorpus(corpus, encoder, cache_dir), **packing)


def mix_data(
    sources: Mapping[str, WeightedCorpus],
    tokenizer: str | None,
    chat_template: str | None,
    cache_dir: str | None,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Returns a data module that mixes several corpora by weight. All corpora use the same tokenizer."""
    loaded = load_tokenizer(tokenizer)
    weights = {name: source.weight for name, source in sources.items()}
    corpora = {}
    for name, source in sources.items():
        encoder: Encoder[Any] = TextEncoder(loaded)
        if isinstance(source.corpus, ChatCorpus):
            encoder = ChatEncoder(loaded, chat_template, skip_rejected=source.corpus.skip_invalid)
        corpora[name] = TokenizedCorpus(source.corpus, encoder, cache_dir)
    return PackedDataModule(Mixture(corpora, weights), **packing)


def synthetic_data(
    vocab_size: PositiveInt,
    document_len: PositiveInt,
    length_sigma: NonNegativeFloat,
    **packing: Unpack[PackingOptions],
) -> PackedDataModule:
    """Returns a data module with random tokens, for benchmarks. document_len, length_sigma: as in `SyntheticSource`."""
    return PackedDataModule(SyntheticSource(vocab_size, document_len, length_sigma), **packing)
