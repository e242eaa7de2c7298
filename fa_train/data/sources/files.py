"""Finds, hashes and reads files of documents. Errors name the file and the line."""

import csv
import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet

CSV_VALUE = 2**26  # the largest number of characters of a value; a quote without an end must not fill the memory
PARQUET_ROWS = 256  # rows per read; Arrow's default is 65,536 rows, which do not fit in memory if each row is a book
WILDCARDS = frozenset("*?[")
KINDS_SHOWN = 6  # FileCounts.text names at most this many kinds of skipped files
RECOVERED = "lost+found"  # the folder into which fsck puts recovered files; only the user root can read this folder


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


@dataclass(frozen=True)
class FileCounts:
    """The number of files that are read, and the number of skipped files of each kind, as {kind: number}."""

    read: int
    skipped: Counter[str]

    def __add__(self, other: "FileCounts") -> "FileCounts":
        return FileCounts(self.read + other.read, self.skipped + other.skipped)

    def text(self) -> str:
        # list kinds such as .jsonl.gz first, because these files may be compressed training data
        kinds = sorted(self.skipped.items(), key=lambda item: (item[0].count(".") < 2, -item[1], item[0]))
        parts = [f"{number:,} {kind}" for kind, number in kinds[:KINDS_SHOWN]]
        if rest := sum(number for _, number in kinds[KINDS_SHOWN:]):
            parts.append(f"{rest:,} others")
        return f"{self.read:,} read" + ("; skipped " + ", ".join(parts) if parts else "")


def find_files(path: str, suffixes: Sequence[str]) -> tuple[Path, list[Path], FileCounts]:
    """Finds the files to read. path: a file, a folder or a glob. suffixes: in lower case.

    Returns the folder to which document keys are relative, the sorted files, and the counts of files. Links are
    followed, and each file is read once. Names that begin with a dot and folders with the name lost+found are skipped,
    unless `path` names them. The suffix of a file may be in upper case.
    Raises: ValueError if no file has one of the suffixes, a folder cannot be read or a link leads to nothing.
    """
    wanted = f"data.path must be a file, folder or glob of {', '.join(suffixes)}"
    if not path.strip():
        raise ValueError(f"{wanted}; got an empty text")
    base = Path(path).expanduser()
    with _readable(base):
        if base.is_file():
            if suffix_of(base) not in suffixes:
                raise ValueError(f"{wanted}; got {path}")
            return base.parent, [base], FileCounts(1, Counter())
        root, pattern = _root_and_pattern(base)
        if not root.is_dir():
            reason = "is neither a file nor a folder" if base.exists() else "does not exist"
            raise ValueError(f"{wanted}; {path} {reason}")
        found, skipped = _sort_out(_matching(root, pattern), suffixes)
    once = _once(root, found)
    # .csv files in a folder are skipped if there are other files: a .csv file often only describes the other files
    files = ([p for p in once if suffix_of(p) != ".csv"] if base.is_dir() else []) or once
    left_out = {"links to files that are already read": len(found) - len(once), ".csv": len(once) - len(files)}
    counts = FileCounts(len(files), skipped + Counter(left_out))  # adding Counters drops counts of 0
    if not files:
        raise ValueError(f"{wanted}; {path} contains no such file ({counts.text()})")
    return root, files, counts


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file in lower case."""
    return path.suffix.lower()


def _root_and_pattern(base: Path) -> tuple[Path, Sequence[str]]:
    """Splits a path before its first wildcard. For a folder, the pattern matches all files below it."""
    first = next((i for i, part in enumerate(base.parts) if WILDCARDS & set(part)), None)
    if first is None or base.is_dir():
        return base, ("**", "*")
    return Path(*base.parts[:first]), base.parts[first:]


def _sort_out(matches: Iterable[tuple[Path, bool]], suffixes: Sequence[str]) -> tuple[set[Path], Counter[str]]:
    """Returns the files that have one of the suffixes, and the number of skipped names of each kind.

    matches: the pairs that `_matching` yields.
    Raises: ValueError if a link without a suffix, or with one of the suffixes, leads to nothing.
    """
    found, skipped = set(), Counter[str]()
    for path, is_hidden in set(matches):
        suffix = suffix_of(path)
        if is_hidden:
            skipped["names that begin with a dot"] += 1
        elif suffix in suffixes:
            if _is_file(path):
                found.add(path)
        elif _is_file(path) if not suffix else os.path.isfile(path):
            stem = suffix_of(Path(path.stem))  # for example .jsonl, if the file is chats.jsonl.gz
            skipped[(stem if stem in suffixes else "") + suffix or "without a suffix"] += 1
    return found, skipped


def _once(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Returns the sorted paths, with only one path to each file.

    If several paths lead to a file, the function prefers a path without links below `root`.
    """
    chosen: dict[str, Path] = {}
    top, ordered = os.path.realpath(root), sorted(paths)
    for path, real in zip(ordered, real_paths(ordered), strict=True):
        if real not in chosen or real == os.path.join(top, path.relative_to(root)):
            chosen[real] = path
    return sorted(chosen.values())


def real_paths(paths: Iterable[Path]) -> Iterator[str]:
    """Yields each path with its links resolved, in the same order."""
    real_folder = cache(os.path.realpath)  # on some disks, it takes long to resolve all links in a path
    for path in paths:
        yield os.path.realpath(path) if path.is_symlink() else os.path.join(real_folder(path.parent), path.name)


def _matching(folder: Path, pattern: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """Yields pairs (path, is_hidden) for the paths below a folder that match a pattern, such as ("**", "*.txt").

    A path is hidden if its name begins with a dot that the pattern does not name. Nothing below it is yielded.
    Path.glob is not used, because it skips folders that cannot be read, and does not follow links in `**`.
    """
    part, *rest = pattern
    if part == "**":
        for below, is_hidden in _folders(folder):
            yield from [(below, True)] if is_hidden else _matching(below, rest or ["*"])
        return
    is_glob = bool(WILDCARDS & set(part))
    for name in fnmatch.filter(os.listdir(folder), part) if is_glob else [part]:
        if is_glob and name == RECOVERED:
            continue
        if is_glob and name.startswith(".") and not part.startswith("."):
            yield folder / name, True
        elif not rest:
            yield folder / name, False
        elif (folder / name).is_dir():
            yield from _matching(folder / name, rest)


def _folders(top: Path) -> Iterator[tuple[Path, bool]]:
    """Yields pairs (path, is_hidden) for a folder and all folders below it. Follows links to other folders.

    A folder below `top` is hidden if its name begins with a dot. Any other folder is entered and yielded only once.
    """
    seen = set()
    starts = [str(top)]
    for start in starts:  # links are appended to `starts` and followed last, so real paths have priority
        for folder, names, _ in os.walk(start, onerror=_raise):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()  # os.walk does not enter the folders that are removed from its list
                continue
            seen.add(real)
            yield Path(folder), False
            yield from ((Path(folder, name), True) for name in names if name.startswith("."))
            names[:] = sorted(name for name in names if name != RECOVERED and not name.startswith("."))
            starts += [link for name in names if os.path.islink(link := os.path.join(folder, name))]


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_file(path: Path) -> bool:
    """Returns whether `path` is a file. Raises: ValueError if `path` is a link that leads to nothing."""
    if path.is_file():
        return True
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"a link must lead to a file or folder; {path} leads to {os.readlink(path)}, which does not exist"
        )
    return False


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Converts an OSError to a ValueError that names the file or folder.

    path: the path that the ValueError names if the OSError has no file name.
    """
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise ValueError(f"files and folders must be readable; {name} is not: {error.strerror}") from error


def hash_files(root: Path, paths: Iterable[Path], setting: str = "") -> str:
    """Hashes the files' contents, their names relative to root, and a setting that affects reading."""
    digest = hashlib.blake2b(repr(setting).encode(), digest_size=16)
    for path in paths:
        with _readable(path), path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").hexdigest()
        digest.update(repr((path.relative_to(root).as_posix(), content)).encode())
    return digest.hexdigest()


def read_text(path: Path) -> str:
    """Reads a text file in UTF-8, without a byte order mark. Raises: ValueError if the file is not valid UTF-8."""
    with _readable(path):
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise _not_utf8(f"{path}, line {line}", error.object[error.start]) from error


def _invalid_byte(error: UnicodeEncodeError, where: str) -> ValueError:
    """Returns an error about the byte that errors="surrogateescape" has decoded to a surrogate."""
    return _not_utf8(where, ord(error.object[error.start]) - 0xDC00)  # the surrogate of byte b is U+DC00 + b


def _not_utf8(where: str, byte: int) -> ValueError:
    """Returns an error about a byte that is not valid UTF-8. where: the file and the line."""
    encoding = "utf-16" if byte in (0xFE, 0xFF) else "latin1"  # UTF-16 begins with one of these bytes
    return ValueError(
        f"a text file must be UTF-8; {where} has the byte {byte:#04x}. Decompress a compressed file, and convert a "
        f"file in another encoding, for example with `iconv -f {encoding} -t utf-8`. `iconv -c -f utf-8 -t utf-8` "
        "removes invalid bytes"
    )


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[SourceRow]:
    """Yields the rows of a file.

    A .jsonl file has one object per line. A .json file contains a list of objects. The first line of a .csv file
    contains the column names. All values of a .csv file are read as texts. Empty lines of .jsonl and .csv files are
    skipped, so an empty file has no rows.
    columns: the columns to read from a .parquet file, or None to read all columns.
    Raises: ValueError if a .json file is not a list, or a .parquet or .csv file is not valid. If a line of a .jsonl
    file is not valid UTF-8 or JSON, or a row is not an object, read_rows raises no error. The property `value` of an
    invalid row raises ValueError.
    """
    readers = {".jsonl": _lines, ".json": _items, ".csv": _csv}
    read = readers.get(suffix_of(path))
    yield from read(path) if read else _parquet(path, columns)


def count_rows(path: Path) -> int | None:
    """Returns the number of rows of a .parquet file, or None if `path` has another suffix."""
    if suffix_of(path) != ".parquet":
        return None
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        return file.metadata.num_rows


def total_count(counts: Iterable[int | None]) -> int | None:
    """Returns the sum of the counts, or None if one of them is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def column_names(path: Path) -> list[str]:
    """Returns the column names of a .parquet file."""
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def _lines(path: Path) -> Iterator[SourceRow]:
    # With surrogateescape, a line that is not UTF-8 is an invalid row, and the lines after it can still be read.
    with _readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield SourceRow(number, where, _parsed(line, where))


def _parsed(line: str, where: str) -> dict[str, Any] | ValueError:
    """Returns the JSON object in a line, or a ValueError, which is returned and not raised."""
    try:
        line.encode()
        return _object(json.loads(line), "every line must be a JSON object", where)
    except UnicodeEncodeError as error:
        return _invalid_byte(error, where)
    except ValueError as error:  # the line is not JSON, or has a huge integer
        return ValueError(f"every line must be a JSON object; {where} is not: {error}")


def _object(value: Any, wanted: str, where: str) -> dict[str, Any] | ValueError:
    """Returns `value` if it is a dict, and otherwise a ValueError, which is returned and not raised."""
    return value if isinstance(value, dict) else ValueError(f"{wanted}; {where} is a {type(value).__name__}")


def _items(path: Path) -> Iterator[SourceRow]:
    text = read_text(path)
    try:
        items = json.loads(text)
    except ValueError as error:  # the text is not JSON, or has a huge integer
        where = f"{path}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        hint = ". A file with one object per line must be named .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"a .json file must be a list of objects; {where} is not: {error}{hint}") from error
    if not isinstance(items, list):
        raise ValueError(f"a .json file must be a list of objects; {path} is a {type(items).__name__}")
    for number, value in enumerate(items, 1):
        where = f"{path}, row {number}"
        yield SourceRow(number, where, _object(value, "a .json file must be a list of objects", where))


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[SourceRow]:
    number = 0
    with _named_corruption(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
            for value in batch.to_pylist(maps_as_pydicts="lossy"):  # if a map repeats a key, the last value is kept
                number += 1
                yield SourceRow(number, f"{path}, row {number}", without_nulls_below(value))


def _csv(path: Path) -> Iterator[SourceRow]:
    rows = _csv_rows(path)
    _, names = next(rows, ("", []))
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the columns of {path} must have different names; got {min(repeated)} more than once")
    for number, (where, values) in enumerate(rows, 1):
        if len(values) != len(names):
            raise ValueError(
                f"each row of a .csv file must have as many values as its first row, which has {len(names)}; the row "
                f"that begins in {where} has {len(values)}"
            )
        yield SourceRow(number, f"{path}, row {number}", dict(zip(names, values, strict=True)))


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the place and the values of each row. The first row has the column names. Empty lines are skipped."""
    csv.field_size_limit(CSV_VALUE)
    with _readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader, line = csv.reader(_utf8_lines(file, path), strict=True), 1  # the next row begins in this line
        try:
            for row in reader:
                if row:
                    yield f"{path}, line {line}", row
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"a value of a .csv file may have up to {CSV_VALUE:,} characters, and a value that begins with a quote "
                f"must end with a quote before a comma or a new line; the row that begins in {path}, line {line} "
                f'cannot be read: {error}. Write a quote inside a quoted value as ""'
            ) from error


def _utf8_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    """Yields the lines of a file that was opened with errors="surrogateescape".

    Raises: ValueError if a byte is not UTF-8.
    """
    for number, line in enumerate(file, 1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise _invalid_byte(error, f"{path}, line {number}") from error
        yield line


def without_nulls_below(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of an Arrow table. Objects inside its columns lose the keys whose value is null.

    Arrow gives all objects in a column the same keys. If an object lacks a key of another row's object, Arrow adds this
    key with the value null. Nulls in the original data look the same as Arrow's nulls, so both are removed.
    A column with the value null stays, because error messages list the names of all columns.
    """
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


@contextmanager
def _named_corruption(path: Path) -> Iterator[None]:
    """Converts an error of Arrow, for example about a missing Parquet footer, to a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:  # OverflowError: a huge date
        raise ValueError(f"{path} must be a Parquet file; it cannot be read: {error}") from error
