"""Stores tokenised documents in memory-mapped Arrow files.

The name of each folder is a hash of the corpus and the encoder.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fa_train.data.packing.rows import LossMask
from fa_train.data.sources.corpus import Corpus, WithValidation
from fa_train.data.tokens.encoding import Encoder, outside_vocabulary
from fa_train.data.tokens.prepare import FORMAT, LOSS_MASK, SHARDS, SKIPPED, write_shards
from fa_train.data.tokens.tokenizer import HFTokenizer
from fa_train.errors import is_of_disk

HELD_OUT_TAIL = 50  # if no whole document can be held out, the last 1 / 50 of the longest document is held out
SHORTEST_TAIL = 2  # the held-out part of a document has at least 2 tokens, because a single token has no label


def prepare(corpus: Corpus[Any], encoder: Encoder[Any], cache_dir: Path, workers: int = 1) -> Path:
    """Tokenises a corpus unless its shards are in the cache. Returns the folder of the shards.

    The shards do not depend on the number of workers.
    Raises: ValueError if the corpus is empty, or changes while it is tokenised. Also raises all errors from reading or
    encoding the corpus.
    """
    fingerprint = corpus.fingerprint()
    key = hashlib.blake2b(f"{FORMAT}\0{fingerprint}\0{encoder.identity}".encode(), digest_size=16)
    path = cache_dir / f"{key.hexdigest()}.arrow"
    if not path.exists():
        write_shards(corpus, encoder, path, workers, fingerprint)
    return path


class Documents:
    """The training or held-out documents of a tokenised corpus. Item i is a memory-mapped array, (length,) int32.

    loss_mask is None if the model is trained on all tokens. The hash of a document's key decides whether the document
    is held out. In a small corpus, the hashes may select all documents or none. Two rules then replace the hashes.
    In a corpus of several chats, the last chat is held out.
    In a corpus of one chat, or of documents that are not chats, the last part of the longest document is held out. If
    the last part has fewer than SHORTEST_TAIL tokens, nothing is held out.
    If `divided` is true, the user has named the documents to hold out, and only these documents are held out.
    is_tail: whether the held-out document is the last part of a training document.
    rows_skipped: the number of rows of the whole corpus that were skipped as invalid documents.
    Raises: ValueError if a file is missing, truncated or damaged. Reading a document raises ValueError if a token is
    not between 0 and vocab_size - 1.
    """

    def __init__(self, path: Path, *, held_out: bool, vocab_size: int, divided: bool = False) -> None:
        self._vocab_size = vocab_size
        self.rows_skipped = int((path / SKIPPED).read_text()) if (path / SKIPPED).exists() else 0
        files = _whole_shards(path)
        tables = [_read_shard(file) for file in files]
        self._files = [file for file, shard in zip(files, tables, strict=True) for _ in shard["tokens"].chunks]
        table = pa.concat_tables(tables)
        chunks = table["tokens"].chunks
        self._values = [chunk.values.to_numpy() for chunk in chunks]
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        start = np.concatenate([x[:-1] for x in offsets])
        length = np.concatenate([np.diff(x) for x in offsets])
        chunk_index = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        masked = LOSS_MASK.name in table.column_names
        flags, tail = table["held_out"].to_numpy(), 0
        if not divided:
            flags, tail = _choose_held_out(flags, length, masked)
        chosen = flags == held_out
        self.is_tail = held_out and tail > 0
        longest = int(length.argmax())
        if self.is_tail:
            start[longest] += length[longest] - tail
            length[longest] = tail
            chosen[longest] = True
        else:
            length[longest] -= tail
        self._start, self._chunk, self.lengths = start[chosen], chunk_index[chosen], length[chosen]
        self.loss_mask: LossMask | None = None
        if masked:
            masks = [chunk.values.to_numpy().view(bool) for chunk in table[LOSS_MASK.name].chunks]
            self.loss_mask = StoredMask(masks, self._chunk, self._start, self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def largest_token(self) -> int:
        """Returns the largest token of the training and the held-out documents. Reads all documents."""
        return max(int(values.max(initial=0)) for values in self._values)

    def __getitem__(self, index: int) -> np.ndarray:
        start, chunk = self._start[index], self._chunk[index]
        tokens = self._values[chunk][start : start + self.lengths[index]]
        # without this check, the GPU would report an invalid token, but would not name the file
        if (outside := outside_vocabulary(tokens, self._vocab_size)) is not None:
            vocabulary = f"0 to {self._vocab_size - 1}"
            raise _damage(self._files[chunk], f"token {outside} is outside the vocabulary, {vocabulary}")
        return tokens


def _choose_held_out(flags: np.ndarray, length: np.ndarray, masked: bool) -> tuple[np.ndarray, int]:
    """Applies the rules for small corpora that the docstring of Documents describes.

    flags: for each document, whether the hash of its key selects it to be held out. length: the length of each
    document. masked: whether the documents are chats.
    Returns which documents are held out, and the number of held-out tokens at the end of the longest document.
    """
    of_texts = flags[length > 0]  # an empty document can be neither trained on nor evaluated
    if of_texts.any() and not of_texts.all():
        return flags, 0
    if masked and len(flags) > 1:
        return np.arange(len(flags)) == len(flags) - 1, 0
    tail = int(length.max()) // HELD_OUT_TAIL
    return np.zeros_like(flags), tail if tail >= SHORTEST_TAIL else 0


def _whole_shards(folder: Path) -> list[Path]:
    """Returns the paths of all shards in a folder. Raises: ValueError if a shard is missing or has the wrong size."""
    try:
        sizes = json.loads((folder / SHARDS).read_text())
    except (OSError, ValueError) as error:
        if is_of_disk(error):  # a disk error does not mean that the file is damaged
            raise
        raise _damage(folder / SHARDS, f"it cannot be read: {error}") from error
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else 0
        if found != size:
            raise _damage(folder / name, f"it has {found:,} of {size:,} bytes")
    return [folder / name for name in sizes]


def _read_shard(file: Path) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        table.validate(full=True)  # checks the offsets too
    except (pa.ArrowException, OSError) as error:
        if is_of_disk(error):  # a disk error does not mean that the file is damaged
            raise
        raise _damage(file, f"it cannot be read: {error}") from error
    return table


def _damage(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is damaged: {what}. Delete {file.parent}, and the next run writes it again")


class StoredMask:
    """The loss mask of each document. Item i is a memory-mapped array, (length,) bool."""

    def __init__(self, values: Sequence[np.ndarray], chunk: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        self._values, self._chunk, self._start, self._length = values, chunk, start, length

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._start[index]
        return self._values[self._chunk[index]][start : start + self._length[index]]

    def count(self, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """For each of n ranges of tokens, returns the number of tokens that the model is trained on.

        Range i has the tokens from start[i] to stop[i] - 1 of the document with the index document[i].
        Shapes: (n,) int64.
        """
        chunk, origin = self._chunk[document], self._start[document]
        counts = np.empty(len(document), np.int64)
        order = np.argsort(chunk, kind="stable")
        edges = np.searchsorted(chunk[order], np.arange(len(self._values) + 1))
        for values, first, last in zip(self._values, edges, edges[1:], strict=False):
            here = order[first:last]
            running = np.concatenate([[0], np.cumsum(values)])
            counts[here] = running[origin[here] + stop[here]] - running[origin[here] + start[here]]
        return counts


class TokenizedCorpus:
    """A corpus, its encoder, and the cache of its tokens.

    encoder: turns documents of the corpus into tokens. cache_dir: by default $FA_TRAIN_CACHE, or ~/.cache/fa_train if
    this variable is not set.
    """

    def __init__(self, corpus: Corpus[Any], encoder: Encoder[Any], cache_dir: str | None) -> None:
        self.corpus, self.encoder = corpus, encoder
        self.cache_dir = Path(cache_dir or os.environ.get("FA_TRAIN_CACHE") or "~/.cache/fa_train").expanduser()
        self.vocab_size, self.pad_id = encoder.tokenizer.vocab_size, encoder.tokenizer.pad_id
        self.min_vocab_size = encoder.tokenizer.min_vocab_size
        self._path: Path | None = None  # the folder of the shards, or None until the corpus is prepared

    def prepare(self, workers: int = 1) -> Path:
        """Tokenises the corpus in `workers` processes, unless the tokens are in the cache. Returns the shards' folder.

        Only the first call reads the corpus. To find the tokens in the cache, the first call hashes all files of the
        corpus. Hashing a large corpus takes long.
        """
        if self._path is None:
            self._path = prepare(self.corpus, self.encoder, self.cache_dir, workers)
        return self._path

    def require_embeddings(self, n_embeddings: int) -> None:
        """Raises: ValueError if the corpus has a token that is not below n_embeddings.

        If the model has an embedding for every token of the tokenizer, the method does not read the corpus.
        """
        if n_embeddings >= self.vocab_size:
            return
        largest = Documents(self.prepare(), held_out=False, vocab_size=self.vocab_size).largest_token()
        if largest >= n_embeddings:
            tokenizer = self.encoder.tokenizer
            text = f", {tokenizer.hf.convert_ids_to_tokens(largest)}" if isinstance(tokenizer, HFTokenizer) else ""
            raise ValueError(
                f"the corpus must have only tokens below {n_embeddings}, for which the model has embeddings; got "
                f"{largest}{text}. Remove the text of this token from the corpus"
            )

    def documents(self, *, held_out: bool) -> Documents:
        """Returns the training documents, or the documents that are held out for validation.

        Raises: ValueError if the user has named files for validation, but the returned documents would have no tokens.
        """
        divided = isinstance(self.corpus, WithValidation)
        documents = Documents(self.prepare(), held_out=held_out, vocab_size=self.vocab_size, divided=divided)
        if isinstance(self.corpus, WithValidation) and not documents.lengths.any():
            raise ValueError(f"{self.corpus.shown(held_out)} must have a document with text; it has none")
        return documents
