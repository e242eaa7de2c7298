"""Writes the checkpoint folder of a sharded run, and reads it without running code from it.

Torch's reader could run code from the folder, because it unpickles `.metadata` and non-tensor values without
restrictions.
"""

import io
import pickle
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fa_train.checkpoints.files import (
    META,
    UNREADABLE,
    CheckpointError,
    damaged,
    not_written,
    read_file,
    remove,
    require_checkpoint,
    require_intact,
    require_intact_slice,
    write_file,
)
from fa_train.parallel.background_save import PATIENCE, BackgroundSave
from fa_train.parallel.communication import host_group

METADATA_CRC32 = "metadata_crc32"  # the file `META` stores the CRC32 of `.metadata` under this key
COPY_AHEAD = 10_000_000  # bytes, torch's default
DTYPES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}
DCP = "torch.distributed.checkpoint"
METADATA_GLOBALS = {
    *(("torch", dtype) for dtype in DTYPES),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((f"{DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # the module of PosixPath in Python 3.13
    ("collections", "OrderedDict"),
}  # fmt: skip


class CheckpointFiles(TorchCheckpointIO):
    """A checkpoint plugin for Lightning, which writes checkpoint files, and reads both files and sharded folders."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: BackgroundSave | None = None
    ) -> None:
        if storage_options is None:
            write_file(checkpoint, Path(path))
        else:
            storage_options.start(checkpoint, lambda copied: write_file(copied, Path(path)), Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return load_sharded(Path(path)) if Path(path).is_dir() else read_file(Path(path))


class FolderWriter(dcp.FileSystemWriter):
    """Torch's writer of a sharded folder. When all ranks have written their parts, rank 0 adds the file `META`."""

    def __init__(self, folder: Path, meta: dict[str, Any], *, on_host: bool) -> None:
        # Data in host memory needs no copy. With per_thread_copy_ahead > 0, torch would wait for the current GPU, which
        # is GPU 0 in a new thread.
        super().__init__(folder, per_thread_copy_ahead=0 if on_host else COPY_AHEAD)
        self._meta = meta

    def write_data(self, *args: Any) -> Future[list[WriteResult]]:
        """Writes the files of this rank. Raises: CheckpointError if writing fails."""
        try:
            return super().write_data(*args)
        except (OSError, RuntimeError) as error:
            # torch sends the error to the other ranks without its cause, so the cause must be read here
            raise not_written(Path(self.path), error) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        write_file(self._meta | {METADATA_CRC32: _crc32(folder / ".metadata")}, folder / META)


@contextmanager
def _planning_group() -> Iterator[dist.ProcessGroup]:
    """Makes a process group in which the ranks plan a checkpoint. NCCL would need GPU memory, which can be full."""
    group = host_group(PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def write_folder(
    state: dict[str, Any], meta: dict[str, Any], folder: Path, background: BackgroundSave | None = None
) -> None:
    """Writes this rank's part of `state`. Rank 0 also writes `meta`. All ranks must call this function.

    background: the BackgroundSave that calls this function, or None. With a BackgroundSave, `state` is in host memory.
    Raises: CheckpointError on all ranks if any rank fails. After a failure, rank 0 removes the folder.
    """
    try:
        writer = FolderWriter(folder, meta, on_host=background is not None)
        with nullcontext(background.writers) if background else _planning_group() as group:
            dcp.save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # torch raises this error on all ranks
        if dist.get_rank() == 0:
            with suppress(OSError):  # for example, if the file system has become read-only
                remove(folder)
        first = next(iter(error.failures.values()))[0]
        raise first if isinstance(first, CheckpointError) else not_written(folder, first) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles `.metadata`, but allows only the classes and functions that torch's distributed checkpoints need.

    A pickle can also set attributes of these classes, for example replace PosixPath.parent, and so change the paths of
    the whole program. `load` undoes such changes and raises an error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._attributes: dict[type, dict[str, Any]] = {}  # {class: its attributes before loading}

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            changed = [name for kind, before in self._attributes.items() for name in _restored(kind, before)]
            if changed:
                raise pickle.UnpicklingError(f"its .metadata changes {changed[0]}, which no checkpoint does")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of an Enum with getattr
            return _member
        if (module, name) not in METADATA_GLOBALS:
            raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which no checkpoint needs")
        found = super().find_class(module, name)
        if isinstance(found, type):
            self._attributes.setdefault(found, dict(vars(found)))
        return found


def _restored(kind: type, before: dict[str, Any]) -> list[str]:
    """Restores the attributes of a class. Returns the names of the attributes that had changed."""
    missing, now = object(), dict(vars(kind))
    changed = sorted(name for name in before | now if now.get(name, missing) is not before.get(name, missing))
    changed = [name for name in changed if name != "__slotnames__"]  # copyreg caches it
    for name in changed:
        if name in before:
            type.__setattr__(kind, name, before[name])
        else:
            type.__delattr__(kind, name)
    return [f"{kind.__name__}.{name}" for name in changed]


def _member(kind: Any, name: str) -> Enum:
    """Returns a member of an Enum. Raises: pickle.UnpicklingError if `kind` is not an Enum."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"its .metadata calls getattr on {kind}, which no checkpoint needs")
    return kind[name]


class FolderReader(dcp.FileSystemReader):
    """Torch's reader of a sharded folder, but with an allow-list of classes for `.metadata`."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Reads `.metadata`. Raises: CheckpointError if `.metadata` does not describe a checkpoint in this folder."""
        folder = Path(self.path)
        try:
            with (folder / ".metadata").open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            _require_metadata(metadata)
        except UNREADABLE as error:
            raise damaged(folder, error) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class FolderPlanner(DefaultLoadPlanner):
    """Torch's load planner, but restricted to tensors and plain values, such as numbers and strings."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # super().load_bytes would run code from `value`
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_into(values: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """Loads a sharded checkpoint into `values`. Fills the tensors in `values` in place, and replaces all other items.

    alone: whether this process reads without other ranks.
    Raises: CheckpointError if the folder is damaged or lacks a value.
    """
    reader = FolderReader(folder)
    reader.read_metadata()  # if `.metadata` is damaged, read_metadata raises an error before torch logs a traceback
    try:
        with warnings.catch_warnings():  # if `alone` is true, torch warns that only one process loads
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            with nullcontext() if alone else _planning_group() as group:
                dcp.load(values, storage_reader=reader, planner=FolderPlanner(), no_dist=alone, process_group=group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first if isinstance(first, CheckpointError) else damaged(folder, first) from error
    except UNREADABLE as error:
        raise damaged(folder, error) from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads everything in a sharded checkpoint except weights and optimizer states.

    Raises: CheckpointError if the folder is not a sharded checkpoint.
    """
    require_checkpoint(folder)
    return read_file(folder / META)


def stored_weights(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's weights as tensors on the meta device. The keys are the weights' names in LitGPT."""
    prefix = "state_dict."
    return {
        name.removeprefix(prefix): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for name, stored in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }


def require_whole(checkpoint: Path) -> None:
    """Checks every stored byte of a checkpoint. Raises: CheckpointError if the file or folder is damaged."""
    require_checkpoint(checkpoint)
    if not checkpoint.is_dir():
        require_intact(checkpoint)
        read_file(checkpoint, mmap=True)
        return
    meta = read_meta(checkpoint)
    require_intact(checkpoint / META)
    _require_intact_metadata(checkpoint, meta.get(METADATA_CRC32))
    for stored in FolderReader(checkpoint).read_metadata().storage_data.values():
        require_intact_slice(checkpoint / stored.relative_path, stored.offset, stored.length)


def read_parts(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns two dicts: the entries of a checkpoint, such as global_step, and the weights of the checkpoint.

    If the checkpoint is a file, its weights are mapped into memory. If the checkpoint is a folder, the weights are on
    the meta device.
    Raises: CheckpointError if the checkpoint is damaged.
    """
    if checkpoint.is_dir():
        return read_meta(checkpoint), stored_weights(FolderReader(checkpoint).read_metadata())
    content = read_file(checkpoint, mmap=True)
    return content, content.get("state_dict", {})


def load_sharded(folder: Path) -> dict[str, Any]:
    """Reads a sharded checkpoint into CPU memory, in the format of an unsharded run's checkpoint.

    torch's dcp_to_torch_save is not used, because it unpickles files of the folder without an allow-list, and writes
    the checkpoint to another file.
    Raises: CheckpointError if the folder is not a sharded checkpoint of train.py.
    """
    checkpoint = read_meta(folder)
    metadata = FolderReader(folder).read_metadata()
    values = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata)
        else None
        for name, stored in metadata.state_dict_metadata.items()
    }
    load_into(values, folder, alone=True)
    weights: dict[str, Any] = {}
    # {optimizer: ({parameter name: state}, {index: parameter group})}
    optimizers: dict[str, tuple[dict[str, Any], dict[int, Any]]] = {}
    for name, (part, *keys) in _paths(folder, metadata):
        if part == "state_dict":
            [weight] = keys
            weights[weight] = values[name]
            continue
        kind, owner, field = keys
        states, groups = optimizers.setdefault(part, ({}, {}))
        (states if kind == "state" else groups).setdefault(owner, {})[field] = values[name]
    states_in_order = [_by_place(folder, *optimizers[part]) for part in sorted(optimizers)]
    return checkpoint | {"state_dict": weights, "optimizer_states": states_in_order}


def _require_intact_metadata(folder: Path, crc32: int | None) -> None:
    """Checks the CRC32 of `.metadata`.

    crc32: the expected value, or None for a checkpoint of an older version of fa_train.
    """
    try:
        intact = crc32 is None or _crc32(folder / ".metadata") == crc32
    except OSError as error:
        raise damaged(folder, error) from error
    if not intact:
        raise damaged(folder, ValueError("the CRC32 of its .metadata is wrong"))


def _crc32(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _require_metadata(metadata: object) -> None:
    """Raises: ValueError if a checkpoint's metadata is malformed or names a file outside the checkpoint's folder."""
    if not isinstance(metadata, Metadata) or not (
        isinstance(metadata.storage_data, dict) and isinstance(metadata.planner_data, dict)
    ):
        raise ValueError("its .metadata is not that of a sharded checkpoint")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise ValueError(f"its .metadata names the file {stored.relative_path}, outside of the folder")


def _paths(folder: Path, metadata: Metadata) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the name of each stored value and its path in a run's state.

    A path has one of three forms: ("state_dict", weight), (optimizer, "state", parameter, field) or
    (optimizer, "param_groups", number of the group, field).
    Raises: CheckpointError if a path in `.metadata` has none of the three forms, or has no stored value.
    """
    for name, path in metadata.planner_data.items():
        match path if name in metadata.state_dict_metadata else None:
            case ("state_dict", str()) | (str(), "state", str(), str()) | (str(), "param_groups", int(), str()):
                yield name, path
            case _:
                raise CheckpointError(f"{folder / '.metadata'} must name weights and optimizer states; got {name}")


def _by_place(folder: Path, states: dict[str, Any], groups: dict[int, Any]) -> dict[str, Any]:
    """Converts an optimizer's state to torch.optim's format: numbers replace the names of parameters.

    Raises: CheckpointError if the optimizer has a state for a parameter that is in no parameter group.
    """
    names = [name for place in sorted(groups) for name in groups[place].get("params", [])]
    places = {name: place for place, name in enumerate(names)}
    if unknown := sorted(states.keys() - places.keys()):
        raise CheckpointError(
            f"{folder / '.metadata'} has optimizer states of {unknown[0]}, but no group that names it"
        )
    return {
        "state": {places[name]: state for name, state in states.items()},
        "param_groups": [
            group | {"params": [places[name] for name in group.get("params", [])]}
            for _, group in sorted(groups.items())
        ],
    }


def saved_optimizer(folder: Path) -> dict[str, Any]:
    """Returns a sharded checkpoint's optimizer state_dict.

    The tensors in the state_dict are on the meta device. The settings in the state_dict, such as lr, are None.
    """
    metadata = FolderReader(folder).read_metadata()
    states: dict[str, Any] = {}
    settings: dict[str, None] = {}
    for name, (part, *keys) in _paths(folder, metadata):
        if part == "state_dict":
            continue
        kind, owner, field = keys
        stored = metadata.state_dict_metadata[name]
        if kind == "param_groups":
            settings[field] = None
        elif isinstance(stored, TensorStorageMetadata):
            states.setdefault(owner, {})[field] = torch.empty(stored.size, device="meta")
    return {"state": states, "param_groups": [settings]}
