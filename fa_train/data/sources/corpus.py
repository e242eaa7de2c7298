"""Where documents come from. A corpus yields (key, document); a hash of the key holds some out for validation."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from fa_train.data.sources.files import column_names, count_rows, find_files, hash_files, read_rows
from fa_train.private_names import private

Document = TypeVar("Document", covariant=True)
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
HELD_OUT_IN_1000 = 20  # of the documents, for validation


@runtime_checkable  # fa_train.settings tells a corpus from a text or number in a config
class Corpus(Protocol[Document]):
    """A source of documents, text or chats, the same at every reading."""

    def documents(self) -> Iterator[tuple[str, Document]]:
        """(key, document), in a fixed order; len of a document is its characters.

        Keys differ, and stay when the corpus moves to another folder.
        """

    def count(self) -> int | None:
        """How many documents, where that is known without reading them all."""

    def fingerprint(self) -> str:
        """A hash that changes when any document does."""


def is_held_out(key: str) -> bool:
    """Whether a document is for validation; depends on nothing but its key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 1000 < HELD_OUT_IN_1000


class StdlibCorpus:
    """Python's own standard library source, without its tests: 12 MB of text on every machine, one document a file."""

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        self.paths = sorted(p for p in self.root.rglob("*.py") if skipped.isdisjoint(p.relative_to(self.root).parts))

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            yield path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8", errors="replace")

    def count(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths)


class TextCorpus:
    """A file, a folder or a glob of .txt and .md (one document a file), .jsonl and .parquet (one a row).

    Raises: ValueError where there is nothing to read, on an unknown kind of file and on a row without text_column.
    """

    def __init__(self, path: str, text_column: str) -> None:
        self.root, self.paths = find_files(path, SUFFIXES)
        self.text_column = text_column

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            key = path.relative_to(self.root).as_posix()
            if path.suffix in (".txt", ".md"):
                yield key, require_text(path.read_text(encoding="utf-8", errors="replace"), "a document", str(path))
            else:
                for number, text in self._read(path):
                    yield f"{key}:{number}", text

    def count(self) -> int | None:
        counts = [1 if path.suffix in (".txt", ".md") else count_rows(path) for path in self.paths]
        return sum(known) if len(known := [n for n in counts if n is not None]) == len(counts) else None

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths, self.text_column)

    def _read(self, path: Path) -> Iterator[tuple[int, str]]:
        if path.suffix == ".parquet":
            require_column(self.text_column, column_names(path), str(path))
        for number, where, row in read_rows(path, [self.text_column]):
            require_column(self.text_column, row, where)
            text = require_text(row[self.text_column], f"data.text_column={self.text_column}", where)
            yield number, text.encode("utf-8", "replace").decode()  # "\ud800" is JSON, but no tokenizer takes it


class HFCorpus:
    """A dataset of the Hugging Face hub, or a folder that `datasets` can load; loaded at its first use.

    Raises: ValueError where it cannot be loaded or has no such column.
    """

    def __init__(self, name: str, config: str | None, split: str, text_column: str) -> None:
        self.name, self.config, self.split, self.text_column = name, config, split, text_column

    @cached_property
    def dataset(self) -> Any:
        asked = f"data.name={self.name}, data.config={self.config}, data.split={self.split}"
        dataset = load_hf_dataset(self.name, self.config, self.split, asked)
        require_column(self.text_column, dataset.column_names, self.name)
        return dataset.select_columns([self.text_column])

    def documents(self) -> Iterator[tuple[str, str]]:
        for number, row in enumerate(self.dataset):
            yield (
                str(number),
                require_text(
                    row[self.text_column], f"data.text_column={self.text_column}", f"{self.name}, row {number}"
                ),
            )

    def count(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        # datasets' own hash: of the revision, or of a folder's files, and of every transform since
        return f"{private('datasets', self.dataset, '_fingerprint')}-{self.text_column}"


def load_hf_dataset(name: str, config: str | None, split: str, asked: str) -> Any:
    """A dataset of the hub, or of a folder. Raises: ValueError naming what was `asked` where it cannot be loaded."""
    from datasets import load_dataset  # seconds to import

    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{asked} must be a dataset that `datasets` can load: {error}") from error


def require_column(column: str, columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    if column not in columns:
        raise ValueError(f"data.text_column={column} must be a column of {where}; it has {', '.join(columns)}")


def require_text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must hold text; {where} holds a {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{name} must hold text; {where} is empty")
    return value
