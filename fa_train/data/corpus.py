"""Where documents come from. A corpus yields (key, text); a stable hash of the key holds some out for validation."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
HELD_OUT_IN_1000 = 20  # of the documents, for validation


class Corpus(Protocol):
    """A source of documents, the same at every reading."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """(key, text), in a fixed order; keys differ, and stay when the corpus moves to another folder."""

    def count(self) -> int | None:
        """How many documents, where that is known without reading them all."""

    def fingerprint(self) -> str:
        """A hash that changes when any document does."""


def is_held_out(key: str) -> bool:
    """Whether a document is for validation; depends on nothing but its key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 1000 < HELD_OUT_IN_1000


def hash_files(root: Path, paths: Iterable[Path], setting: str = "") -> str:
    """Of the names below root and the contents of files, and of a setting that decides how they are read."""
    digest = hashlib.blake2b(repr(setting).encode(), digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").hexdigest()
        digest.update(repr((path.relative_to(root).as_posix(), content)).encode())
    return digest.hexdigest()


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
        self.root, self.paths = find_files(path)
        self.text_column = text_column

    def documents(self) -> Iterator[tuple[str, str]]:
        readers = {".jsonl": self._lines, ".parquet": self._rows}
        for path in self.paths:
            key = path.relative_to(self.root).as_posix()
            reader = readers.get(path.suffix)
            if reader is None:
                yield key, path.read_text(encoding="utf-8", errors="replace")
            else:
                for number, text in reader(path):
                    yield f"{key}:{number}", text

    def count(self) -> int | None:
        if any(path.suffix == ".jsonl" for path in self.paths):
            return None
        return sum(
            pyarrow.parquet.read_metadata(path).num_rows if path.suffix == ".parquet" else 1 for path in self.paths
        )

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths, self.text_column)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"every line must be a JSON object; {where} is not: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"every line must be a JSON object; {where} is a {type(row).__name__}")
                require_column(self.text_column, row, where)
                text = require_text(row[self.text_column], self.text_column, where)
                yield number, text.encode("utf-8", "replace").decode()  # "\ud800" is JSON, but no tokenizer takes it

    def _rows(self, path: Path) -> Iterator[tuple[int, str]]:
        with pyarrow.parquet.ParquetFile(path) as file:
            require_column(self.text_column, file.schema_arrow.names, str(path))
            number = 0
            for batch in file.iter_batches(columns=[self.text_column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield number, require_text(value, self.text_column, f"{path}, row {number}")


class HFCorpus:
    """A dataset of the Hugging Face hub, or a folder that `datasets` can load; loaded at its first use.

    Raises: ValueError where it cannot be loaded or has no such column.
    """

    def __init__(self, name: str, config: str | None, split: str, text_column: str) -> None:
        self.name, self.config, self.split, self.text_column = name, config, split, text_column

    @cached_property
    def dataset(self) -> Any:
        from datasets import load_dataset  # seconds to import

        try:
            dataset = load_dataset(self.name, self.config, split=self.split)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"data.name={self.name}, data.config={self.config}, data.split={self.split} must be a dataset that "
                f"`datasets` can load: {error}"
            ) from error
        require_column(self.text_column, dataset.column_names, self.name)
        return dataset.select_columns([self.text_column])

    def documents(self) -> Iterator[tuple[str, str]]:
        for number, row in enumerate(self.dataset):
            yield str(number), require_text(row[self.text_column], self.text_column, f"{self.name}, row {number}")

    def count(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        # datasets' own hash: of the revision, or of a folder's files, and of every transform since
        return f"{self.dataset._fingerprint}-{self.text_column}"


def find_files(path: str) -> tuple[Path, list[Path]]:
    """The files that a file, folder or glob names, in order, and the folder that their keys are relative to."""
    kinds = ", ".join(SUFFIXES)
    base = Path(path).expanduser()
    parts = base.parts
    magic = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), None)
    if base.is_file():
        if base.suffix not in SUFFIXES:
            raise ValueError(f"data.path must be a file, folder or glob of {kinds}; got {path}")
        return base.parent, [base]
    if base.is_dir():
        root, found = base, base.rglob("*")
    elif magic is not None:
        root = Path(*parts[:magic])
        found = root.glob("/".join(parts[magic:]))
    else:
        raise ValueError(f"data.path must be a file, folder or glob of {kinds}; {path} does not exist")
    files = sorted(p for p in found if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"data.path must be a file, folder or glob of {kinds}; {path} has none")
    return root, files


def require_column(column: str, columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    if column not in columns:
        raise ValueError(f"data.text_column={column} must be a column of {where}; it has {', '.join(columns)}")


def require_text(value: object, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"data.text_column={column} must hold text; {where} holds a {type(value).__name__}")
    return value
