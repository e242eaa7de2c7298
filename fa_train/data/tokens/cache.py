"""Writes a file to the cache under a temporary name, and renames the complete file. Reports a full disk in one line."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fa_train.errors import FULL


class DiskFullError(ValueError):
    """Raised if the disk that holds the cache is full, or the user's quota is used up."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames the file to `path` at the end. After an error, deletes the file.

    Raises: DiskFullError if the disk is full. ValueError if the folder cannot be created.
    """
    make_folder(path.parent)
    with room_on_disk(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="unfinished-") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


def make_folder(folder: Path) -> None:
    """Creates the cache folder unless it exists. Raises: ValueError if the folder cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ValueError(
            f"data.cache_dir must be a folder that can be created; got {folder}: {error.strerror}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"data.cache_dir must be a writable folder; got {folder}")


@contextmanager
def room_on_disk(folder: Path) -> Iterator[None]:
    """Converts the OSError of a full disk or a used-up quota to a DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFullError(
            f"the disk of the cache folder {folder} is full ({error.strerror}). Free some space, or set "
            "data.cache_dir to a folder on another disk. Finished files are kept"
        ) from error
