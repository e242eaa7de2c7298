"""Finds, hashes and reads files of documents. Errors name the file and the line."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

CSV_BLOCK = 2**26  # bytes that are read at a time; a row of a .csv file must not be larger


@dataclass(frozen=True)
class SourceRow:
    """One row of a file or a dataset.

    number: the row's number, which starts at 1 in a file and at 0 in a dataset.
    where: the file and the row, for error messages.
    content: the row, or the error if the row cannot be read.
    """

    number: int
    where: str
    content: Mapping[str, Any] | ValueError

    @property
    def value(self) -> Mapping[str, Any]:
        """The row as {column: value}. Raises: ValueError if the row cannot be read."""
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


def find_files(path: str, suffixes: Sequence[str]) -> tuple[Path, list[Path]]:
    """Finds the files to read. path: a file, a folder or a glob.

    Returns the folder to which document keys are relative, and the sorted files.
    Raises: ValueError if no file has one of the suffixes.
    """
    listed = ", ".join(suffixes)
    base = Path(path).expanduser()
    parts = base.parts
    magic = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), None)
    if base.is_file():
        if base.suffix not in suffixes:
            raise ValueError(f"data.path must be a file, folder or glob of {listed}; got {path}")
        return base.parent, [base]
    if base.is_dir():
        root, found = base, base.rglob("*")
    elif magic is not None:
        root = Path(*parts[:magic])
        found = root.glob("/".join(parts[magic:]))
    else:
        raise ValueError(f"data.path must be a file, folder or glob of {listed}; {path} does not exist")
    files = sorted(p for p in found if p.suffix in suffixes and p.is_file())
    if not files:
        raise ValueError(f"data.path must be a file, folder or glob of {listed}; {path} contains no such file")
    if base.is_dir():  # skip .csv files that lie next to other files: they often only describe these
        files = [p for p in files if p.suffix != ".csv"] or files
    return root, files


def hash_files(root: Path, paths: Iterable[Path], setting: str = "") -> str:
    """Hashes the files' contents, their names relative to root, and a setting that affects reading."""
    digest = hashlib.blake2b(repr(setting).encode(), digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").hexdigest()
        digest.update(repr((path.relative_to(root).as_posix(), content)).encode())
    return digest.hexdigest()


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[SourceRow]:
    """Yields the rows of a file.

    A .jsonl file has one object per line, and its empty lines are skipped. A .json file contains a list of objects. The
    first line of a .csv file contains the column names. All values of a .csv file are read as texts.
    columns: the columns to read from a .parquet file, or None to read all columns.
    Raises: ValueError if a .json file is not a list, or a .parquet or .csv file is not valid. If a line of a .jsonl
    file is not valid JSON, or a row is not an object, read_rows raises no error. The property `value` of an invalid row
    raises ValueError.
    """
    readers = {".jsonl": _lines, ".json": _items, ".csv": _csv}
    yield from readers[path.suffix](path) if path.suffix in readers else _parquet(path, columns)


def count_rows(path: Path) -> int | None:
    """Returns the number of rows of a .parquet file, or None if `path` has another suffix."""
    if path.suffix != ".parquet":
        return None
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        return file.metadata.num_rows


def column_names(path: Path) -> list[str]:
    """Returns the column names of a .parquet file."""
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def _lines(path: Path) -> Iterator[SourceRow]:
    # files that were written on Windows may begin with a byte order mark, which utf-8-sig skips
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    content = _object(json.loads(line), "every line must be a JSON object", where)
                except json.JSONDecodeError as error:
                    content = ValueError(f"every line must be a JSON object; {where} is not: {error}")
                yield SourceRow(number, where, content)


def _object(value: Any, wanted: str, where: str) -> dict[str, Any] | ValueError:
    """Returns `value` if it is a dict, and otherwise a ValueError, which is returned and not raised."""
    return value if isinstance(value, dict) else ValueError(f"{wanted}; {where} is a {type(value).__name__}")


def _items(path: Path) -> Iterator[SourceRow]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"a .json file must be a list of objects; {path}, line {error.lineno} is not: {error}"
        ) from error
    if not isinstance(items, list):
        raise ValueError(f"a .json file must be a list of objects; {path} is a {type(items).__name__}")
    for number, value in enumerate(items, 1):
        where = f"{path}, row {number}"
        yield SourceRow(number, where, _object(value, "a .json file must be a list of objects", where))


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[SourceRow]:
    number = 0
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=columns):
            for value in batch.to_pylist():
                number += 1
                yield SourceRow(number, f"{path}, row {number}", value)


def _csv(path: Path) -> Iterator[SourceRow]:
    read = pyarrow.csv.ReadOptions(block_size=CSV_BLOCK)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    number = 0
    with _named_corruption(path, "CSV"):
        with pyarrow.csv.open_csv(path, read, parse) as file:
            texts = dict.fromkeys(file.schema.names, pa.string())  # Arrow would read the answer "4" as a number
        convert = pyarrow.csv.ConvertOptions(column_types=texts, strings_can_be_null=False)
        with pyarrow.csv.open_csv(path, read, parse, convert) as file:
            for batch in file:
                for value in batch.to_pylist():
                    number += 1
                    yield SourceRow(number, f"{path}, row {number}", value)


def without_nulls(value: Any) -> Any:
    """Returns `value`, which comes from an Arrow table, without the dict entries that are None.

    Arrow gives all objects in a column the same keys. If an object lacks a key of another row's object, Arrow adds this
    key with the value null. Nulls in the original data look the same as Arrow's nulls, so both are removed.
    """
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


@contextmanager
def _named_corruption(path: Path, kind: str = "Parquet") -> Iterator[None]:
    """Converts an error of Arrow to a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:  # raised, for example, if the Parquet footer is missing
        raise ValueError(f"{path} must be a {kind} file; it cannot be read: {error}") from error
