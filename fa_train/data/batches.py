"""The rows of a run, and the micro-batches that each rank forms from its rows."""

import dataclasses
import gc
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fa_train.data.mixing import MixedRows, Mixture, interleave
from fa_train.data.packing.balance import deal
from fa_train.data.packing.collate import Batch, collate
from fa_train.data.packing.rows import IGNORE_INDEX, Row, ShuffledRows
from fa_train.flops import attention_pairs
from fa_train.parallel.context.shard import ContextShard
from fa_train.parallel.failures import STOPPING

if TYPE_CHECKING:
    from fa_train.data.datamodule import PackedDataModule  # a circular import

VALIDATION_SEED = 0  # the seed for shuffling the validation rows, which does not depend on the run's seed
SAMPLED_ROWS = 256  # the number of rows from which the mean document length is estimated


class PackedRows:
    """An endless sequence of rows, one epoch after another. Each epoch is shuffled with the seed (seed, epoch).

    If several sources are mixed, each source is shuffled separately.
    In validation, only the first `counted` rows have labels. The rows after the first `counted` rows only fill up the
    last micro-batches.
    windows: the window of each layer of the model, as in ModelConfig.windows. The costs of rows depend on the windows.
    Raises: ValueError if a source has no training tokens or no labels left after packing. Also raises ValueError if
    documents are held out, but the first `counted` rows have no labels.
    """

    def __init__(
        self,
        data: "PackedDataModule",
        *,
        held_out: bool,
        shuffle: bool,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.windows = windows
        self.layouts = data.layouts(held_out=held_out)
        self.document_mask, self.reset_positions = data.document_mask, data.reset_positions
        if not held_out:
            self._require_training_labels(data)
        seed = VALIDATION_SEED if held_out else data.seed  # validation uses the same rows in all runs
        self.rows: ShuffledRows | MixedRows
        if isinstance(data.source, Mixture):
            # the seed depends on the source's name, so the order of a source's rows does not depend on the other
            # sources
            seeds = [(seed, zlib.crc32(name.encode())) if shuffle else None for name in self.layouts]
            sources = [ShuffledRows(layout, seed) for layout, seed in zip(self.layouts.values(), seeds, strict=True)]
            shares = data.source.rows_a_cycle
            # validation reads each row once, so some sources can run out of rows before others
            counts = np.array([source.per_epoch for source in sources]) if held_out else shares
            self.rows = MixedRows(sources, interleave(counts, shares))
        else:
            [layout] = self.layouts.values()
            self.rows = ShuffledRows(layout, (seed,) if shuffle else None)
        self.per_epoch = self.rows.per_epoch
        self.counted = min(data.val_rows, self.per_epoch) if held_out else None  # None means that all rows have labels
        if self.counted is not None and data.val_rows:
            self._require_validation_labels(data)
        self.max_documents = self.rows.max_documents if data.document_mask else 1
        self.mean_seqlen = self._mean_seqlen(data.seq_len)
        self.deal = lru_cache(maxsize=2)(self._deal)  # cached, because all micro-batches of a step need the same result

    def _require_training_labels(self, data: "PackedDataModule") -> None:
        """Raises: ValueError if a source has no training tokens or no labels left after packing."""
        for name, layout in self.layouts.items():
            where, report = f" from data.sources.{name}" if name else "", layout.report
            if not layout.n_rows:
                raise ValueError(
                    f"packing must keep at least one document{where}; of {report.documents:,} training documents, "
                    f"{report.documents_empty:,} are empty and data.long_documents drops {report.documents_dropped:,}"
                )
            if report.labels is not None and report.labels.labels_packed == 0:
                raise ValueError(
                    f"packing must keep at least one label{where}; got none of {report.labels.labels_in:,}. If labels "
                    f"were cut off, raise seq_len={data.seq_len} or data.max_doc_len"
                )

    def _require_validation_labels(self, data: "PackedDataModule") -> None:
        """Raises: ValueError if documents are held out, but none of the rows for validation has a label."""
        reports = [layout.report for layout in self.layouts.values()]
        tokens = sum(report.tokens_in for report in reports)
        if not tokens or any((self.row(i).labels != IGNORE_INDEX).any() for i in range(self.counted or 0)):
            return
        documents = sum(report.documents for report in reports)
        dropped = sum(report.documents_dropped for report in reports)
        raise ValueError(
            f"the validation must have at least one label; got {self.counted:,} rows without labels. Of {documents:,} "
            f"held-out documents ({tokens:,} tokens), data.long_documents dropped {dropped:,}. If documents were "
            f"dropped or truncated, increase seq_len (now {data.seq_len}) or data.max_doc_len. data.val_rows=0 turns "
            "validation off"
        )

    def batch(self, first: int, count: int) -> Batch:
        """Concatenates the rows from `first` to `first + count - 1`."""
        return self.gather(range(first, first + count))

    def gather(self, indices: Sequence[int]) -> Batch:
        """Returns the rows with the given indices, concatenated."""
        packed = [self.row(index) for index in indices]
        return collate(
            packed, self.max_documents, self.mean_seqlen, document_mask=self.document_mask,
            reset_positions=self.reset_positions,
        )  # fmt: skip

    def row(self, index: int) -> Row:
        epoch, place = self.rows.locate(index)
        row = epoch.row(place)
        if self.counted is None or index < self.counted:
            return row
        return dataclasses.replace(row, labels=np.full_like(row.labels, IGNORE_INDEX))

    def lengths(self, index: int) -> np.ndarray:
        """Returns the length of each document in a row, as `Epoch.lengths` does."""
        epoch, place = self.rows.locate(index)
        return epoch.lengths(place)

    def _mean_seqlen(self, seq_len: int) -> int:
        """Returns the mean document length in tokens, estimated from the first rows.

        The mean is weighted: the weight of a document is its length. The mean document length determines which
        attention kernels run. The mean document length must be equal in all steps and on all ranks, because the model
        is compiled for one choice of attention kernels.
        """
        rows = range(min(self.per_epoch, SAMPLED_ROWS))
        if not self.document_mask or not rows:
            return seq_len
        squares = sum(int((self.lengths(index) ** 2).sum()) for index in rows)
        return round(squares / len(rows) / seq_len)

    def _deal(self, first: int, count: int, size: int, world_size: int) -> np.ndarray:
        """Assigns the rows from `first` to `first + count - 1` to micro-batches and ranks.

        Returns row indices of shape (accumulation, world_size, size). `size` is the number of rows in a micro-batch.
        Micro-batches have similar attention costs (`attention_pairs`). If all rows have equal costs, the rows keep
        their order and go to the ranks round-robin. Without document_mask, all rows have equal costs.
        """
        indices = np.arange(first, first + count)
        if self.document_mask:
            lengths = (torch.from_numpy(self.lengths(index)) for index in indices.tolist())
            costs = np.array([attention_pairs(self.windows, row).item() for row in lengths])
            if costs.min() != costs.max():
                return indices[deal(costs, size, world_size)]
        return indices.reshape(-1, world_size, size)


class MicroBatches(Dataset[Batch]):
    """The micro-batches of one rank.

    size: rows per micro-batch.
    step_rows: the number of rows in a step, on all ranks together. By default, a step has one micro-batch per rank.
    context: the number of consecutive ranks that share each micro-batch.
    shard: a function such as fa_train.models.gpt.GPT.context_shard. `shard` returns a function that selects a rank's
    part of a micro-batch. `shard` is required if `context` is greater than 1.
    """

    def __init__(
        self,
        rows: PackedRows,
        size: int,
        rank: int,
        world_size: int,
        *,
        step_rows: int | None = None,
        context: int = 1,
        shard: Callable[[int, int], ContextShard] | None = None,
    ) -> None:
        self.rank, place = divmod(rank, context)
        self.world_size = world_size // context  # ranks that share a micro-batch count as one here
        if context > 1 and shard is None:
            raise ValueError(f"{context} ranks that share a micro-batch need `shard`; got None")
        self.shard = None if shard is None else shard(place, context)
        self.rows, self.size = rows, size
        self.step_rows = size * self.world_size if step_rows is None else step_rows

    def __getitem__(self, index: int) -> Batch:
        step, micro_batch = divmod(index, self.step_rows // (self.size * self.world_size))
        dealt = self.rows.deal(step * self.step_rows, self.step_rows, self.size, self.world_size)
        indices = dealt[micro_batch, self.rank].tolist()
        batch: Batch = {**self.rows.gather(indices), "first_row": indices[0]}
        return batch if self.shard is None else self.shard(batch)


class TimedLoader(DataLoader[Batch]):
    """A DataLoader that measures how long the host waits for micro-batches. waited: the total wait in seconds."""

    waited = 0.0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # Lightning only calls next
        return self._timed(super().__iter__())

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batch


class RangeSampler(DistributedSampler[int]):
    """Yields the indices from start to stop - 1.

    All ranks need the same indices, because MicroBatches itself selects the rows of a rank. With several ranks,
    Lightning by default replaces the sampler, so that ranks get different indices. RangeSampler is a
    DistributedSampler, because Lightning does not replace a DistributedSampler.
    The length of the sampler is `stop`, although the sampler yields only `stop - start` indices. Lightning expects the
    length of the whole run, which includes the batches before a resume.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop


class ForkingLoader(TimedLoader):
    """A TimedLoader whose forked workers share the memory of the training process.

    A shared page is copied when a process writes to it, and Python's garbage collector writes to each object that it
    visits. Without this class, one full garbage collection in a worker would copy most of the shared pages.
    After `gc.freeze`, the garbage collector ignores all objects that existed when the workers were forked. Call
    `gc.unfreeze` when the run ends.
    multiprocessing_context must be "fork", and worker_init_fn must be `leave_signals_to_the_run`.
    """

    _has_workers = False

    def __iter__(self) -> Any:
        if self.num_workers and not self._has_workers:
            gc.collect()  # without gc.collect, gc.freeze would keep existing garbage until the end of the run
            gc.freeze()
            self._has_workers = self.persistent_workers
        # Workers start with these signals blocked. Otherwise, a signal before worker_init_fn would end a worker.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def leave_signals_to_the_run(worker_id: int) -> None:
    """Makes a data worker ignore Ctrl-C, SIGUSR1, SIGHUP and SLURM's SIGTERM, which reach every process of a run.

    After a signal, data workers must still provide micro-batches, because a run of several ranks may process more
    micro-batches before it saves a checkpoint. A SIGTERM from the parent process still ends a data worker.
    A thread waits for SIGTERM with sigwaitinfo, and ends the worker if the parent process sent it. ForkingLoader blocks
    SIGTERM, because in Linux, sigwaitinfo receives an ignored signal only if it is blocked.
    """
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
