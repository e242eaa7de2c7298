"""Checkpoint files and folders.

A checkpoint is written with the suffix `.partial`, flushed to the disk and then renamed.
"""

import io
import math
import os
import pickle
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

SUFFIX, PARTIAL = ".ckpt", ".partial"
Shapes = Mapping[str, tuple[int, ...]]
CALLBACKS = "callbacks"  # Lightning stores the states of callbacks under this key, {name of the callback: state}
ALLOWED = "a checkpoint must hold only tensors and plain Python values"
META = "meta.pt"  # Lightning's file in a sharded checkpoint, for everything except weights and optimizer states
# the errors that torch.load and zipfile raise if a file is damaged
UNREADABLE = (
    OSError, RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError,
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# the errors that torch.save raises for values that pickle refuses, such as functions and locks
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, or cannot be used. The message is one line for the user."""


def write_file(content: Mapping[str, Any], path: Path) -> None:
    """Writes `content` with torch.save and flushes the file to the disk.

    `read_file` unpickles only tensors and plain values. A callback's state with other values is left out, and a warning
    is printed. If another entry has such values, a warning says that no run can resume from the file.
    Raises: CheckpointError if writing fails, or pickle's error if pickle refuses another entry. An unfinished file is
    removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_and_flush(content, path)
            is_readable = not _forbidden_name(path)
        except UNPICKLABLE:
            is_readable = False
        if not is_readable:
            _write_and_flush({**content, CALLBACKS: readable_states(content.get(CALLBACKS, {}))}, path)
            if name := _forbidden_name(path):
                print(f"warning: no run can resume from a checkpoint with {name}; {ALLOWED}", flush=True)
    except (OSError, RuntimeError, *UNPICKLABLE) as error:
        with suppress(OSError):  # remove fails if, for example, the file system is now read-only
            remove(path)
        raise not_written(path, error) from error


def _write_and_flush(content: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())


def _forbidden_name(file: Path | IO[bytes]) -> str | None:
    """Returns the name of a class or function in a file that `read_file` refuses, or "values of unknown types".

    Returns None if `read_file` accepts the file, or if the file cannot be read. A Path is read with mmap.
    """
    try:
        torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        return found[1] if found else "values of unknown types"
    except (OSError, RuntimeError):
        pass  # for example, mmap is not supported; an error would make write_file remove a complete file
    return None


def readable_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of callbacks that `read_file` can read, and prints a warning for each other state."""
    readable = {}
    for callback, state in states.items():
        file = io.BytesIO()
        try:
            torch.save(state, file)
            file.seek(0)
            name = _forbidden_name(file)
        except UNPICKLABLE as error:
            name = f"a value that pickle refuses ({error})"
        if name:
            print(f"warning: the checkpoint has no state of {callback}; {ALLOWED}; got {name}", flush=True)
        else:
            readable[callback] = state
    return readable


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Returns the one-line error for a save that failed with `error`.

    Raises `error` itself if `error` was not caused by an OSError.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch wraps the OSError
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        raise error
    where = path.with_name(path.name.removesuffix(PARTIAL))
    return CheckpointError(f"the checkpoint {where} could not be written: {cause.strerror or cause}")


def rename_into_place(partial: Path, path: Path) -> None:
    """Renames a finished checkpoint to its final name, and flushes the rename to the disk."""
    flush_folder(partial)
    os.rename(partial, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's list of file names to the disk. Does nothing if `folder` is a file."""
    if folder.is_dir():
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file or folder if it exists.

    A folder is renamed to end in `.partial` before its files are removed. If the removal is interrupted, the remaining
    files therefore count as an unfinished checkpoint.
    """
    if path.is_dir():
        if not path.name.endswith(PARTIAL):
            path = path.rename(path.with_name(path.name + PARTIAL))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes the unfinished checkpoints that killed processes have left in a run's checkpoint folder.

    Ignores checkpoints that cannot be removed, for example on a read-only file system.
    """
    for path in folder.glob(f"*{SUFFIX}{PARTIAL}"):
        with suppress(OSError):
            remove(path)


def read_file(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Reads a file that `write_file` has written. Unpickles only tensors and plain values.

    The returned tensors are in CPU memory.
    Raises: CheckpointError if the file is damaged, or was not written by `write_file`.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except UNREADABLE as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict) or "global_step" not in content:
        raise CheckpointError(f"{path} must be a checkpoint of train.py; it holds no global_step")
    return content


def damaged(path: Path, error: BaseException) -> CheckpointError:
    """Returns the one-line error for a file or folder that cannot be read as a checkpoint."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". This file can still")[0]
    return CheckpointError(f"{path} is damaged or is not a checkpoint of train.py: {reason}")


def require_intact(path: Path) -> None:
    """Checks the CRC32 of each record in a file that torch.save wrote. torch.load does not check the CRC32s.

    The check reads the whole file, at about 1 GB/s. A load right after the check is fast, because the file is usually
    still in the page cache.
    Raises: CheckpointError if the file is damaged or torch.save did not write it.
    """
    try:
        with path.open("rb") as file:
            require_intact_records(file)
    except UNREADABLE as error:
        raise damaged(path, error) from error


def require_intact_records(file: IO[bytes]) -> None:
    """Checks an open file as `require_intact` does. Raises the errors of zipfile if the file is damaged."""
    with zipfile.ZipFile(file) as archive:
        record = archive.testzip()
    if record is not None:
        raise zipfile.BadZipFile(f"the CRC32 of its record {record} is wrong")


def require_intact_slice(path: Path, offset: int, length: int) -> None:
    """Checks one tensor of a sharded checkpoint as `require_intact` does. offset, length: in bytes."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            require_intact_records(io.BytesIO(file.read(length)))
    except UNREADABLE as error:
        raise damaged(path, error) from error


def require_writable(folder: Path, key: str) -> None:
    """Creates a folder. key: the config key that holds the folder's path.

    Raises: ValueError if no file can be written into the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{key} must be a folder that can be written; got {folder}: {error.strerror}") from error


def newest(paths: Iterable[Path]) -> list[Path]:
    """Sorts checkpoints by modification time and name, newest first.

    Skips files that another process has just removed.
    """
    ages = []
    for path in paths:
        with suppress(FileNotFoundError):
            # for a folder, use the time of meta.pt, because the folder's own time changes if a file is added or removed
            written = path / META if (path / META).exists() else path
            ages.append((written.stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(ages, reverse=True)]


def newest_below(folder: Path) -> str:
    """Returns a sentence that names the newest checkpoint in a folder, or an empty string if there is no checkpoint."""
    found = newest(folder.glob(f"**/*{SUFFIX}"))
    return f". Its newest checkpoint is {found[0]}" if found else ""


def require_checkpoint(path: Path) -> None:
    """Raises: CheckpointError if `path` is a special file, or a folder other than that of a sharded checkpoint."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CheckpointError(f"a checkpoint must be a file or a folder; got {path}, a pipe or another special file")
    if path.is_dir() and not (path / META).is_file():
        raise CheckpointError(
            f"a checkpoint must be a {SUFFIX} file, or the folder of a sharded checkpoint; got {path}, a folder "
            f"without {META}{newest_below(path)}"
        )


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether all elements are finite. Waits for a GPU only once."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # use the maximum norm, because the squares in an L2 norm could overflow
    return bool(get_total_norm(floating, math.inf).isfinite())


def shapes(weights: Mapping[str, Tensor]) -> Shapes:
    """Returns the shape of each weight. The keys are the names of the weights."""
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def require_same_shapes(ours: Shapes, theirs: Shapes, checkpoint: str) -> None:
    """Checks that a checkpoint's weights have the same names and shapes as the model's weights.

    checkpoint: the checkpoint's name, for the error message.
    Raises: CheckpointError if a name or a shape differs. The message names the first weight, in
    alphabetical order, that differs between the checkpoint and the model.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            difference = f"the checkpoint has no {name}"
        elif name not in ours:
            difference = f"the model has no {name}"
        elif ours[name] != theirs[name]:
            difference = f"{name} must have the shape {ours[name]}; got {theirs[name]}"
        else:
            continue
        raise CheckpointError(
            f"{checkpoint} does not fit the model: {difference}. "
            "Use the model and adapter settings of the run that wrote it"
        )
