"""Tokenises documents into shards, in one process or several.

The shards do not depend on the number of processes. If tokenising was interrupted, the next start writes only the
shards that are not finished.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from fa_train.data.sources.corpus import Corpus, is_held_out, rows_skipped
from fa_train.data.tokens.cache import make_folder, room_on_disk
from fa_train.data.tokens.encoding import Encoded, Encoder, Rejection, outside_vocabulary

FORMAT = "4"  # part of the cache key: the version of the file format and of tokenisation
SHARDS = "shards.json"  # in a finished folder, this file holds the size of each shard in bytes
SKIPPED = "skipped.json"  # in a finished folder, this file holds the number of skipped rows, if there are any
REJECTED = ".rejected.json"  # the suffix of a file with the number of a shard's rejected documents and the first error
SHARD = 4096  # the maximum number of documents per shard
SHARD_CHARACTERS = 2**24  # a shard ends after this many characters, so that it fits in memory
BATCH = 256  # the maximum number of documents per call of the tokenizer
BATCH_CHARACTERS = 2**21  # a batch ends after this many characters; a tokenizer needs up to 200 bytes per character
TOKENS = pa.field("tokens", pa.large_list(pa.int32()))
HELD_OUT = pa.field("held_out", pa.bool_())
# 1 for each token that the model is trained on, otherwise 0; the column exists only if the encoder has loss masks
LOSS_MASK = pa.field("learned", pa.large_list(pa.uint8()))
Keyed = tuple[str, Any]  # (key, document)

_worker_encoder: Encoder[Any]  # each process of the pool sets this variable when the process starts


def write_shards(corpus: Corpus[Any], encoder: Encoder[Any], path: Path, workers: int, fingerprint: str) -> None:
    """Writes the folder `path` with the shards 000000.arrow, 000001.arrow and so on, in the order of the documents.

    Shards are first written to an unfinished folder next to `path`. The folder is renamed when all shards are finished.
    After an interruption, the next start continues in the unfinished folder. If two processes prepare the same corpus,
    one of them waits. shards.json lists the size of each shard in bytes, so that a reader can detect a missing or
    truncated shard. If the corpus or the encoder skipped rows, skipped.json holds their number.
    fingerprint: the fingerprint of the corpus. The name of `path` depends on this fingerprint.
    Raises: ValueError if the corpus has no document with text, if it has changed since the fingerprint was computed, if
    a document cannot be encoded, if the disk is full, or if a worker process is killed. If the disk is full or a
    process is killed, the finished shards are kept. If a ValueError is about the corpus or a document, all shards are
    deleted.
    """
    unfinished = path.with_name(f"unfinished-{path.stem}")
    with room_on_disk(path.parent):
        make_folder(path.parent)
        with _locked(path.with_suffix(".lock")):
            if path.exists():
                return
            unfinished.mkdir(exist_ok=True)
            try:
                n_documents = _write_all(corpus, encoder, unfinished, workers)
                n_rejected = _count_rejected(corpus, unfinished)
                n_documents -= n_rejected
                require_tokens(corpus.name, n_documents, unfinished)
                if corpus.fingerprint() != fingerprint:
                    raise ValueError(
                        f"{corpus.name} must not change while it is tokenised; it has changed. Its tokens are deleted. "
                        "Start again, with a copy if the files still change"
                    )
            except ValueError:
                shutil.rmtree(unfinished)
                raise
            except BrokenProcessPool as error:
                raise ValueError(
                    f"worker processes must run until the tokens are written; one of {workers} was killed, perhaps "
                    "because the host memory was full. Use fewer workers. Finished shards are kept"
                ) from error
            if skipped := rows_skipped(corpus) + n_rejected:
                (unfinished / SKIPPED).write_text(json.dumps(skipped))
            sizes = {file.name: file.stat().st_size for file in sorted(unfinished.glob("*.arrow"))}
            (unfinished / SHARDS).write_text(json.dumps(sizes))
            os.replace(unfinished, path)


def _locked(file: Path) -> AbstractContextManager[object]:
    """Acquires a lock, and returns a context that releases the lock.

    If another process holds the lock, prints a line and waits. Only the first rank of each machine prints the line.
    """
    lock = FileLock(file)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("waiting for another process, which tokenises the same documents", flush=True)
        return lock.acquire()


def require_tokens(name: str, n_documents: int, folder: Path) -> None:
    """Raises: ValueError if the shards in the folder have no token. name: the name of the corpus, for the message."""
    if not n_documents:
        raise ValueError(f"{name} must have a document; it has none")
    for file in folder.glob("*.arrow"):
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as shard:
            if any(len(chunk.values) for chunk in shard.read_all()["tokens"].chunks):
                return
    raise ValueError(f"{name} must have a document with text; all {n_documents:,} documents are empty")


def _write_all(corpus: Corpus[Any], encoder: Encoder[Any], folder: Path, workers: int) -> int:
    """Writes every shard that is not yet in the folder. Returns the number of documents in the corpus."""
    columns = ("tokenising", BarColumn(), MofNCompleteColumn(), "documents", TimeElapsedColumn())
    n_documents = 0
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=corpus.count())
        for n_written in _written(corpus, encoder, folder, workers):
            n_documents += n_written
            progress.update(task, completed=n_documents)
    return n_documents


def _count_rejected(corpus: Corpus[Any], folder: Path) -> int:
    """Returns the number of documents that the encoder rejected, and prints a line about them."""
    counts = [json.loads(file.read_text()) for file in sorted(folder.glob(f"*{REJECTED}"))]
    n_rejected = sum(count for count, _ in counts)
    if n_rejected:
        line = f"skipped {n_rejected:,} rows of {corpus.name}, which cannot be encoded. The first: {counts[0][1]}"
        print(line.encode("utf-8", "backslashreplace").decode())  # print() rejects file names that are not UTF-8
    return n_rejected


def _written(corpus: Corpus[Any], encoder: Encoder[Any], folder: Path, workers: int) -> Iterator[int]:
    """Writes the shards. Yields the number of documents of each shard as soon as the shard is finished.

    After an error or Ctrl-C, the worker processes end at once.
    """
    shards = _grouped(corpus.documents(), SHARD, SHARD_CHARACTERS)
    tasks = ((shard, folder / f"{number:06}.arrow") for number, shard in enumerate(shards))
    if workers == 1:
        for shard, file in tasks:
            yield _write(encoder, shard, file)
        return
    context = multiprocessing.get_context("spawn")  # a forked process would not have the tokenizer's threads
    # when `own` is closed or this process is killed, `alive` reaches end-of-file and the workers exit
    alive, own = context.Pipe(duplex=False)
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder, alive)) as pool:
        try:
            running: set[Future[int]] = set()
            for shard, file in tasks:
                with _ctrl_c_later():
                    running.add(pool.submit(_write_in_worker, shard, file))
                if len(running) == 2 * workers:  # limit the number of shards in memory
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (task.result() for task in done)
            yield from (task.result() for task in as_completed(running))
        except BaseException:
            own.close()
            if sys.version_info < (3, 11, 5):  # the pools of older Python versions wait until a worker reads a shard
                private_pool: Any = pool
                private_pool._call_queue._reader.close()
            raise


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Delays Ctrl-C until the end of the `with` block.

    A process that is started in the `with` block never receives Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _grouped(keyed: Iterable[Keyed], size: int, characters: int) -> Iterator[list[Keyed]]:
    """Yields groups of consecutive documents. A group ends after `size` documents, or after `characters` characters."""
    group: list[Keyed] = []
    n_characters = 0
    for key, document in keyed:
        group.append((key, document))
        n_characters += len(document)
        if len(group) == size or n_characters >= characters:
            yield group
            group, n_characters = [], 0
    if group:
        yield group


def _start_worker(encoder: Encoder[Any], alive: Connection) -> None:
    global _worker_encoder  # a tokenizer can take several megabytes, so each process receives it only once
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool of processes already uses all cores
    Thread(target=_end_with_parent, args=(alive,), daemon=True).start()


def _end_with_parent(alive: Connection) -> None:
    """Ends this worker process when the parent process closes the pipe or is killed."""
    alive.poll(None)
    os._exit(1)


def _write_in_worker(shard: Sequence[Keyed], file: Path) -> int:
    return _write(_worker_encoder, shard, file)


def _write(encoder: Encoder[Any], shard: Sequence[Keyed], file: Path) -> int:
    """Writes one shard unless its file exists. Returns the number of documents in `shard`, including rejected ones."""
    if not file.exists():
        schema = pa.schema([TOKENS, HELD_OUT, LOSS_MASK] if encoder.masked else [TOKENS, HELD_OUT])
        partial = file.with_suffix(".partial")
        rejections: list[Rejection] = []
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _grouped(shard, BATCH, BATCH_CHARACTERS):
                results = encoder.encode_batch([document for _, document in batch])
                rejections += [result for result in results if isinstance(result, Rejection)]
                accepted = [(k, r) for (k, _), r in zip(batch, results, strict=True) if not isinstance(r, Rejection)]
                if accepted:
                    keys, encoded = zip(*accepted, strict=True)
                    require_vocabulary(encoded, keys, encoder.tokenizer.vocab_size)
                    writer.write(pa.record_batch(_columns(encoded, keys, masked=encoder.masked), schema=schema))
        if rejections:
            file.with_suffix(REJECTED).write_text(json.dumps([len(rejections), str(rejections[0])]))
        os.replace(partial, file)
    return len(shard)


def _columns(encoded: Sequence[Encoded], keys: Sequence[str], *, masked: bool) -> list[pa.Array]:
    ends = pa.array(np.cumsum([0, *(len(document.tokens) for document in encoded)]), pa.int64())
    tokens = np.concatenate([document.tokens for document in encoded])
    columns = [pa.LargeListArray.from_arrays(ends, pa.array(tokens)), pa.array(map(is_held_out, keys))]
    if masked:
        loss_mask = np.concatenate([document.loss_mask for document in encoded]).view(np.uint8)
        columns.append(pa.LargeListArray.from_arrays(ends, pa.array(loss_mask)))
    return columns


def require_vocabulary(encoded: Sequence[Encoded], keys: Sequence[str], vocab_size: int) -> None:
    """Raises: ValueError if a token is not between 0 and vocab_size - 1. The error message names the document."""
    for key, (tokens, _) in zip(keys, encoded, strict=True):
        if (outside := outside_vocabulary(tokens, vocab_size)) is not None:
            raise ValueError(
                f"tokens must be from 0 to {vocab_size - 1}, the tokenizer's vocabulary; document {key} has {outside}"
            )
