"""Corpora of documents with unique keys.

The hash of a document's key decides whether the document is held out for validation.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from fa_train.data.sources.files import (
    FileCounts,
    column_names,
    count_rows,
    find_files,
    hash_files,
    read_rows,
    read_text,
    real_paths,
    suffix_of,
    total_count,
)
from fa_train.private_names import private, replace_private

Document = TypeVar("Document", covariant=True)
SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".parquet")
HELD_OUT_IN_1000 = 20  # held-out documents per thousand
TRAINING, VALIDATION = "data.path:", "data.val_path:"  # WithValidation puts these prefixes before document keys


@runtime_checkable  # fa_train.settings calls isinstance(value, Corpus)
class Corpus(Protocol[Document]):
    """A source of documents, which are texts or chats. Every iteration yields the same documents.

    name: the path or the name of the corpus, for error messages.
    """

    name: str

    def documents(self) -> Iterator[tuple[str, Document]]:
        """Yields pairs (key, document) in a fixed order. len(document) is the number of characters.

        A key is unique, and does not change if the corpus is moved to another folder.
        """

    def count(self) -> int | None:
        """Returns the number of documents, or None if counting would require reading all documents."""

    def fingerprint(self) -> str:
        """Returns a hash of the corpus, which changes if any document changes."""


def rows_skipped(corpus: Corpus[Any]) -> int:
    """Returns the number of rows that the last complete iteration over a corpus skipped. Only ChatCorpus skips rows."""
    return getattr(corpus, "n_skipped", 0)


def file_counts(corpus: Corpus[Any]) -> FileCounts | None:
    """Returns the numbers of files that are read and skipped, or None if the corpus is not read from files."""
    return getattr(corpus, "file_counts", None)


def is_held_out(key: str) -> bool:
    """Returns whether a document is held out for validation. The result depends only on the document's key."""
    if key.startswith((TRAINING, VALIDATION)):
        return key.startswith(VALIDATION)
    encoded = key.encode("utf-8", "surrogateescape")  # the name of a file may contain bytes that are not UTF-8
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") % 1000 < HELD_OUT_IN_1000


class WithValidation(Generic[Document]):
    """Two corpora as one. The documents of `validation` are held out, and those of `training` are not.

    settings: the settings that name the two corpora, such as data.path=<path>, for error messages.
    """

    def __init__(self, training: Corpus[Document], validation: Corpus[Document], settings: tuple[str, str]) -> None:
        self.name = training.name
        self.parts = {TRAINING: training, VALIDATION: validation}
        self._settings = dict(zip(self.parts, settings, strict=True))

    @classmethod
    def read(
        cls,
        read: Callable[[str | Path], Corpus[Document]],
        path: str | Path,
        val_path: str | Path | None,
        key: str = "path",
    ) -> Corpus[Document]:
        """Reads the corpora at `path` and `val_path`. If val_path is None, returns read(path).

        key: the settings data.<key> and data.val_<key> hold `path` and `val_path`.
        Raises: the ValueError of `read`. If the error concerns val_path, the message says so.
        """
        training = read(path)
        if val_path is None:
            return training
        settings = f"data.{key}={path}", f"data.val_{key}={val_path}"
        try:
            return cls(training, read(val_path), settings)
        except ValueError as error:
            raise ValueError(f"{settings[1]}: {error}") from error

    def documents(self) -> Iterator[tuple[str, Document]]:
        for prefix, corpus in self.parts.items():
            try:
                for key, document in corpus.documents():
                    yield prefix + key, document
            except ValueError as error:
                raise ValueError(f"{self.shown(prefix == VALIDATION)}: {error}") from error

    def shown(self, held_out: bool) -> str:
        """Returns the setting that names a corpus, such as data.path=<path> or data.val_path=<path>."""
        return self._settings[VALIDATION if held_out else TRAINING]

    @property
    def n_skipped(self) -> int:
        return sum(map(rows_skipped, self.parts.values()))

    @property
    def file_counts(self) -> FileCounts | None:
        counts = [known for known in map(file_counts, self.parts.values()) if known is not None]
        return sum(counts[1:], counts[0]) if counts else None

    @property
    def overlap_warning(self) -> str | None:
        """A warning if some files are read for training and for validation. Otherwise, the value is None."""
        training, validation = (set(real_paths(getattr(corpus, "paths", ()))) for corpus in self.parts.values())
        shared = sorted(training & validation)
        if not shared:
            return None
        return (
            f"{len(shared):,} of {len(validation):,} files for validation are also read for training, such as "
            f"{shared[0]}. The model is trained on their documents, so val/loss does not measure new documents"
        )

    def count(self) -> int | None:
        return total_count(corpus.count() for corpus in self.parts.values())

    def fingerprint(self) -> str:
        prints = " ".join(corpus.fingerprint() for corpus in self.parts.values())
        return hashlib.blake2b(prints.encode(), digest_size=16).hexdigest()


class StdlibCorpus:
    """The source code of Python's standard library without tests, about 12 MB. Each file is one document."""

    name = "the standard library"

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        paths: list[Path] = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in skipped]  # os.walk does not enter skipped folders
            paths += (Path(folder, name) for name in files if name.endswith(".py"))
        self.paths = sorted(paths)

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            yield path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8", errors="replace")

    def count(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths)


class TextCorpus:
    """Text documents from a file, a folder or a glob.

    A .txt or .md file is one document. Each row of a .jsonl, .csv or .parquet file is one document.
    Raises: ValueError if there is nothing to read at `path`, if the suffix of a file is not supported, if a file is not
    UTF-8, or if a row has no text_column.
    """

    def __init__(self, path: str | Path, text_column: str) -> None:
        path = str(path)
        if is_saved_dataset(path):
            raise ValueError(
                f"data.path must be text files; {path} is a dataset that save_to_disk has written. Use data=hf "
                f"data.name={path} instead"
            )
        self.root, self.paths, self.file_counts = find_files(path, SUFFIXES)
        self.name, self.text_column = path, text_column

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            key = path.relative_to(self.root).as_posix()
            if suffix_of(path) in (".txt", ".md"):
                yield key, require_text(read_text(path), "a document", str(path))
            else:
                for number, text in self._read(path):
                    yield f"{key}:{number}", text

    def count(self) -> int | None:
        return total_count(1 if suffix_of(path) in (".txt", ".md") else count_rows(path) for path in self.paths)

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths, self.text_column)

    def _read(self, path: Path) -> Iterator[tuple[int, str]]:
        if suffix_of(path) == ".parquet":
            require_column(self.text_column, column_names(path), str(path))
        for row in read_rows(path, [self.text_column]):
            require_column(self.text_column, row.value, row.where)
            text = require_text(row.value[self.text_column], f"data.text_column={self.text_column}", row.where)
            # replace lone surrogates, because tokenizers reject them
            yield row.number, text.encode("utf-8", "replace").decode()


class HFCorpus:
    """A Hugging Face dataset, which `load_hf_dataset` loads on first use.

    Raises: ValueError if `name` is empty or a file, or the dataset cannot be loaded or has no text_column.
    """

    def __init__(self, name: str, config: str | None, split: str, text_column: str) -> None:
        if not name.strip():
            raise ValueError("data.name must be a dataset of the Hugging Face hub or a folder; got an empty text")
        if os.path.isfile(Path(name).expanduser()):
            raise ValueError(
                f"data.name must be a dataset of the Hugging Face hub or a folder; {name} is a file. Use data=text "
                f"data.path={name}"
            )
        self.name, self.config, self.split, self.text_column = name, config, split, text_column

    @cached_property
    def dataset(self) -> Any:
        asked = f"the split {self.split} of data.name={self.name}, data.config={self.config}"
        dataset = load_hf_dataset(self.name, self.config, self.split, asked)
        require_column(self.text_column, dataset.column_names, self.name)
        return dataset.select_columns([self.text_column])

    def documents(self) -> Iterator[tuple[str, str]]:
        for number, row in enumerate(self.dataset):
            value, where = row[self.text_column], f"{self.name}, row {number}"
            yield str(number), require_text(value, f"data.text_column={self.text_column}", where)

    def count(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        # `_fingerprint` is a hash of the dataset's revision or files, and of all transforms of the dataset
        return f"{private('datasets', self.dataset, '_fingerprint')}-{self.text_column}"


def is_saved_dataset(path: str) -> bool:
    """Returns whether `path` is a folder that `save_to_disk` of the `datasets` library has written.

    Returns False if the path cannot be read. The function that opens the path then raises an error that names it.
    """
    if not path.strip():  # an empty path would mean the current directory
        return False
    folder = Path(path).expanduser()
    of_split = os.path.isfile(folder / "dataset_info.json") and os.path.isfile(folder / "state.json")
    return of_split or os.path.isfile(folder / "dataset_dict.json")


def load_hf_dataset(name: str, config: str | None, split: str, asked: str) -> Any:
    """Loads a dataset from the hub, from a folder of data files, or from a folder that `save_to_disk` has written.

    asked: the user's settings, for the error message.
    Raises: ValueError if the dataset cannot be loaded.
    """
    from datasets import load_dataset  # the import takes seconds
    from datasets.exceptions import DatasetsError

    try:
        if is_saved_dataset(name):
            return _load_saved_dataset(name, config, split)
        if (folder := Path(name).expanduser()).is_dir():
            return _load_data_files(str(folder), config, split)
        return load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{asked} must be a dataset that `datasets` can load: {error}") from error
    except DatasetsError as error:  # for example, invalid JSON; `error.__cause__` names the row
        raise ValueError(f"{asked} must be a dataset that `datasets` can load: {error}: {error.__cause__}") from error


def _load_saved_dataset(folder: str, config: str | None, split: str) -> Any:
    """Loads a folder that `save_to_disk` has written. A single Dataset without splits counts as the split `train`.

    split: the name of a split, or a part of one, such as `train[:10%]`.
    Raises: ValueError or OSError if the dataset cannot be loaded, the split does not exist or has no rows, or `config`
    is not None.
    """
    from datasets import DatasetDict, ReadInstruction, concatenate_datasets, load_from_disk

    if config is not None:
        raise ValueError(f"a dataset of save_to_disk has no configs; got config {config}")
    # The code below hashes the dataset's files. With keep_in_memory=True, the dataset would have no list of its files.
    try:
        saved = load_from_disk(str(Path(folder).expanduser()), keep_in_memory=False)
    except IndexError as error:  # save_to_disk writes no file for a dataset without rows
        raise ValueError(f"each split of a saved dataset must have rows; {folder} has a split without rows") from error
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    sizes = {name: len(rows) for name, rows in splits.items()}
    ranges = [r for r in ReadInstruction.from_spec(split).to_absolute(sizes) if r.from_ < r.to]
    if not ranges:
        raise ValueError(f"the split must select rows; got {split}, which selects none (rows per split: {sizes})")
    used = {name: _with_content_hash(splits[name]) for name in {r.splitname for r in ranges}}
    return concatenate_datasets([used[r.splitname].select(range(r.from_, r.to)) for r in ranges])


def _with_content_hash(saved: Any) -> Any:
    """Returns a copy of a saved dataset. The copy's fingerprint is a hash of the dataset's files.

    The fingerprint that `datasets` saves is a hash of the transforms of a dataset. Datasets with different rows can
    therefore have the same saved fingerprint. The rows of the returned dataset have all columns, as Python objects. If
    the dataset was saved with a format (Dataset.set_format), the returned dataset does not have this format.
    """
    dataset = saved.with_format(None)
    files = [Path(file["filename"]) for file in dataset.cache_files]
    content = hash_files(files[0].parent, files, repr(dataset.features))
    replace_private("datasets", dataset, "_fingerprint", content)
    return dataset


def _load_data_files(folder: str, config: str | None, split: str) -> Any:
    """Loads a folder with data files, such as .jsonl or .parquet files.

    Raises: ValueError or OSError if the dataset cannot be loaded.
    """
    from datasets import load_dataset, load_dataset_builder

    named = load_dataset_builder(folder, config).config.data_files or {}
    files = sorted({Path(file) for of_split in named.values() for file in of_split})
    content = hash_files(Path("/"), filter(Path.is_file, files))  # a README.md can list URLs, which are not hashed
    # `datasets` reuses cached rows if the files' modification times and the argument `description` have not changed.
    # The argument `description` is a hash of the files' contents, so the rows of changed files are read again.
    return load_dataset(folder, config, split=split, description=content)


def require_column(column: str, columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    if column not in columns:
        raise ValueError(f"data.text_column={column} must be a column of {where}; it has {', '.join(columns)}")


def require_text(value: object, name: str, where: str) -> str:
    """Returns `value`, or an empty text if `value` is null or only white space. An empty document gets no tokens.

    name: the kind of `value`, for example "a document", for the error message.
    where: the file or row that contains `value`, for the error message.
    Raises: ValueError if `value` is neither a text nor null.
    """
    if not isinstance(value, str | None):
        raise ValueError(f"{name} must hold text; {where} holds a {type(value).__name__}")
    return value if value and not value.isspace() else ""
