"""Files of the cache: each appears whole or not at all, and a full disk says so."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or a quota is reached


class DiskFullError(ValueError):
    """The disk of the cache, or a quota of it, is full."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write, which becomes `path` at the end; after an error nothing is left.

    Raises: DiskFullError where the disk is full, ValueError where the folder cannot be made.
    """
    make_folder(path.parent)
    with room_on_disk(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="unfinished-") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


def make_folder(folder: Path) -> None:
    """Makes the cache folder unless it exists. Raises: ValueError if that fails or the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ValueError(f"data.cache_dir must be a folder that can be made; got {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"data.cache_dir must be a folder that can be written; got {folder}")


@contextmanager
def room_on_disk(folder: Path) -> Iterator[None]:
    """Raises: DiskFullError where the disk or a quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFullError(
            f"the disk of the cache must have room; {folder} has none left ({error.strerror}). Make room, or set "
            "data.cache_dir to another disk; whatever was finished is kept"
        ) from error
