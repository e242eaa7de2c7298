"""Tokenizers, which convert text to token ids and back."""

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

# the names of a tokenizer's files start with one of these texts
FILE_PREFIXES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "spiece")
FILE_SUFFIXES = (".json", ".model", ".txt", ".jinja")
ORIGIN = ("is_local", "local_files_only")  # settings of a saved tokenizer that say where it was loaded from


class Tokenizer(Protocol):
    """The methods and attributes that the data pipeline needs from a tokenizer."""

    vocab_size: int
    min_vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int

    @property
    def identity(self) -> str:
        """A hash or a name of the tokenizer. Two tokenizers that produce different ids have different identities."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, (length,) int32, without bos and eos."""

    def decode(self, ids: Sequence[int]) -> str:
        """Converts token ids to text, without special tokens."""


class ByteTokenizer:
    """A tokenizer whose ids are UTF-8 bytes. The ids of bos, eos and pad are 256, 257 and 258."""

    vocab_size = min_vocab_size = 259
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id = 258
    identity = "bytes-259"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class HFTokenizer:
    """A tokenizer of the `transformers` library, loaded from a folder or by its hub name.

    hf: the wrapped tokenizer. vocab_size: the highest id plus one.
    min_vocab_size: the number of embeddings that a model needs at least. Some checkpoints have no embeddings for
    added tokens that no text contains, such as <image_soft_token> of Gemma 3 1B. min_vocab_size therefore counts no
    added tokens except bos, eos and padding.
    pad_id: the pad token. If the tokenizer has no pad token, pad_id is the id of eos, or 0 if there is no eos. Padding
    is never a label, so any token can be padding.
    key: the name of the setting or argument that holds `name`, for error messages.
    Raises: ValueError if the tokenizer cannot be loaded, has only special tokens, or has Python code of its own.
    """

    def __init__(self, name: str, key: str = "data.tokenizer") -> None:
        from transformers import AutoTokenizer  # the import takes seconds

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # prevents a warning when this process forks
        self.name = name
        _require_no_broken_links(name, key)
        try:
            # without trust_remote_code=False, transformers asks on the terminal whether to run the tokenizer's own code
            self.hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # the library `tokenizers` raises Exception; damaged files can cause a KeyError
            if "trust_remote_code" in str(error):  # the error message advises to trust the code
                raise ValueError(
                    f"{key} must be a tokenizer without Python code of its own; got {name}, whose code is never run"
                ) from error
            is_clear = isinstance(error, OSError | ValueError | ImportError)
            what = error if is_clear else f"{type(error).__name__}: {error}"
            raise ValueError(f"{key} must be a folder or hub name with a tokenizer; got {name}: {what}") from error
        vocabulary = self.hf.get_vocab()
        # without tokenizer files, transformers returns a tokenizer that has only special tokens
        if not vocabulary.keys() - set(self.hf.all_special_tokens):
            raise ValueError(
                f"{key} must be a folder or hub name with a tokenizer; got {name}, whose tokenizer has only special "
                "tokens. The tokenizer's files may be missing"
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id = self.hf.bos_token_id
        self.eos_id = self.hf.eos_token_id
        pads = (self.hf.pad_token_id, self.eos_id, 0)
        self.pad_id = next(i for i in pads if i is not None)
        added = set(self.hf.get_added_vocab())
        always = [i for i in (self.bos_id, self.eos_id, self.pad_id) if i is not None]
        self.min_vocab_size = max(*always, *(i for token, i in vocabulary.items() if token not in added)) + 1

    @cached_property
    def identity(self) -> str:
        backend = getattr(self.hf, "backend_tokenizer", None)  # slow tokenizers have no backend
        content = backend.to_str() if backend is not None else self._saved_files()
        special = (type(self.hf).__name__, self.bos_id, self.eos_id)
        # backend.to_str() does not contain the flag split_special_tokens
        flag = "split_special_tokens" if getattr(self.hf, "split_special_tokens", False) else ""
        return hashlib.blake2b(f"{special}{content}{flag}".encode(), digest_size=16).hexdigest()

    @cached_property
    def vocabulary_hash(self) -> str:
        """A hash of the vocabulary, bos and eos.

        Unlike `identity`, this hash is the same in all versions of the transformers library.
        """
        content = sorted(self.hf.get_vocab().items()), self.bos_id, self.eos_id
        return hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def template_hash(self) -> str:
        """A hash of the chat template."""
        return hashlib.blake2b(repr(self.hf.chat_template).encode(), digest_size=16).hexdigest()

    def _saved_files(self) -> str:
        """Returns the files that a slow tokenizer saves, for example its vocabulary, merges and settings."""
        with TemporaryDirectory() as folder:
            self.hf.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
        settings = json.loads(files.pop("tokenizer_config.json", b"{}"))
        return repr((files, {name: value for name, value in settings.items() if name not in ORIGIN}))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        options: dict[str, bool] = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None:
            return [np.asarray(ids, dtype=np.int32) for ids in self.hf(list(texts), **options)["input_ids"]]
        self.hf("", **options)  # sets the backend's options, such as no truncation
        # encode_batch_fast computes no offsets; they would be a quarter of the memory that tokenising needs
        encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encoded]

    def begin_with_bos(self) -> None:
        """Makes `hf` put bos at the start of each text, like TextEncoder.

        If there is no bos, `hf` adds no token before a text.
        A tokenizer that already begins texts correctly is not changed. A slow tokenizer is not changed, because it has
        no post-processor.
        """
        begin = [] if self.bos_id is None else [self.bos_id]
        if self.hf.is_fast and self.hf("").input_ids not in (begin, [*begin, self.eos_id]):
            self.hf.add_bos_token = bool(begin)  # this replaces the post-processor that save_pretrained saves

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=True))


def _require_no_broken_links(name: str, key: str) -> None:
    """Raises: ValueError if a tokenizer file in the folder `name` is a link that leads to nothing.

    Copies of folders from the hub's cache can have such links, and transformers would ignore some of them.
    """
    try:
        paths = sorted(Path(name).iterdir())
    except OSError:  # a name of the hub, or a folder that cannot be read, for which transformers raises an error
        return
    for path in paths:
        if path.name.startswith(FILE_PREFIXES) and path.suffix in FILE_SUFFIXES and not path.exists():
            raise ValueError(
                f"{key} must be a folder with a tokenizer; {path} is a link to {os.readlink(path)}, which is missing"
            )


def load_tokenizer(name: str | None) -> Tokenizer:
    """Loads a tokenizer by its Hugging Face name or from its folder. If name is None, returns the byte tokenizer."""
    return ByteTokenizer() if name is None else HFTokenizer(name)
