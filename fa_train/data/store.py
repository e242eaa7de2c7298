"""Tokenised documents in one memory-mapped Arrow file: written once, found again by the hash of what made it."""

import hashlib
import os
import tempfile
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from fa_train.data.corpus import Corpus, is_held_out
from fa_train.data.tokenizer import Tokenizer

FORMAT = "1"  # of the file, and of how text becomes documents; another one is another cache entry
BATCH = 256  # documents tokenised at one time
HELD_OUT_TAIL = 50  # 1 / 50 of a document is held out where no whole one can be
SCHEMA = pa.schema([("tokens", pa.large_list(pa.int32())), ("held_out", pa.bool_())])


def prepare(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Tokenises a corpus unless the cache has it; returns the file.

    Every document is wrapped in the tokenizer's bos and eos. The file appears whole or not at all, so that processes
    that prepare at one time do no harm.
    Raises: ValueError where the corpus has no document.
    """
    key = hashlib.blake2b(f"{FORMAT}\0{corpus.fingerprint()}\0{tokenizer.identity}".encode(), digest_size=16)
    path = cache_dir / f"{key.hexdigest()}.arrow"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="unfinished-") as folder:
            unfinished = Path(folder, path.name)
            _write(corpus, tokenizer, unfinished)
            os.replace(unfinished, path)
    return path


def _write(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> None:
    before, after = (np.array([] if i is None else [i], np.int32) for i in (tokenizer.bos_id, tokenizer.eos_id))
    columns = ("tokenising", BarColumn(), MofNCompleteColumn(), "documents", TimeElapsedColumn())
    documents = iter(corpus.documents())
    n_documents = 0
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, SCHEMA) as writer,
        Progress(*columns, transient=True) as progress,
    ):
        task = progress.add_task("", total=corpus.count())
        while batch := list(islice(documents, BATCH)):
            keys, texts = zip(*batch, strict=True)
            ids = [np.concatenate([before, body, after]) for body in tokenizer.encode_batch(texts)]
            ends = np.cumsum([0, *map(len, ids)])
            tokens = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(np.concatenate(ids)))
            writer.write(pa.record_batch([tokens, pa.array(map(is_held_out, keys))], schema=SCHEMA))
            n_documents += len(batch)
            progress.update(task, completed=n_documents)
    if not n_documents:
        raise ValueError("the corpus must have a document; it has none")


class Documents:
    """The documents of a prepared file for training, or those held out; item i is its tokens, (length,) int32, mapped.

    Where hashing puts every document on one side, as in a corpus of one, the end of the longest is held out instead.
    """

    def __init__(self, path: Path, *, held_out: bool) -> None:
        self._source = path, held_out
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        chunks = table["tokens"].chunks
        self._values = [chunk.values.to_numpy() for chunk in chunks]
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        start = np.concatenate([x[:-1] for x in offsets])
        length = np.concatenate([np.diff(x) for x in offsets])
        chunk_index = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        flags = table["held_out"].to_numpy()
        chosen = flags == held_out
        if flags.all() or not flags.any():
            longest = int(length.argmax())
            tail = int(length[longest]) // HELD_OUT_TAIL
            if held_out:
                start[longest] += length[longest] - tail
                length[longest] = tail
                chosen = np.arange(len(flags)) == longest
            else:
                length[longest] -= tail
                chosen = np.full(len(flags), True)
        self._start, self._chunk, self.lengths = start[chosen], chunk_index[chosen], length[chosen]

    def __reduce__(self) -> tuple[object, ...]:
        # a data worker that is not forked maps the file again rather than be sent its tokens
        path, held_out = self._source
        return _open_documents, (path, held_out)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._start[index]
        return self._values[self._chunk[index]][start : start + self.lengths[index]]


def _open_documents(path: Path, held_out: bool) -> Documents:
    return Documents(path, held_out=held_out)


class TokenizedCorpus:
    """A corpus, its tokenizer and where the tokenised file is kept; cache_dir None is $FA_TRAIN_CACHE or ~/.cache."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, cache_dir: str | None) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.cache_dir = Path(cache_dir or os.environ.get("FA_TRAIN_CACHE") or "~/.cache/fa_train").expanduser()
        self.vocab_size, self.pad_id = tokenizer.vocab_size, tokenizer.pad_id

    @cached_property
    def path(self) -> Path:
        """The tokenised file, written now if the cache lacks it."""
        return prepare(self.corpus, self.tokenizer, self.cache_dir)

    def documents(self, *, held_out: bool) -> Documents:
        """Those for training, or those for validation."""
        return Documents(self.path, held_out=held_out)
