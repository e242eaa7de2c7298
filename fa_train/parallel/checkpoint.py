"""The folder that a sharded run writes as its checkpoint, read by one process that holds the whole model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

META = "meta.pt"  # Lightning's name for what is no tensor of the model or the optimizer


class CheckpointReader(TorchCheckpointIO):
    """Lightning's own files, and sharded folders too; strategies that shard read those by themselves."""

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        if not Path(path).is_dir():
            checkpoint: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return checkpoint
        return load_sharded(Path(path))


def load_sharded(folder: Path) -> dict[str, Any]:
    """What a run on one device would have written, in host memory.

    Raises: ValueError on a folder that is no sharded checkpoint.
    """
    if not (folder / META).is_file():
        raise ValueError(f"a checkpoint must be a file, or a sharded run's folder with {META}; {folder} has none")
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    values = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata)
        else None
        for name, stored in metadata.state_dict_metadata.items()
    }
    dcp.load(values, storage_reader=reader, no_dist=True)
    weights: dict[str, Any] = {}
    optimizers: dict[str, tuple[dict[str, Any], dict[int, Any]]] = {}  # states by parameter's name, groups by place
    for name, (part, *keys) in metadata.planner_data.items():
        if part == "state_dict":
            [weight] = keys
            weights[weight] = values[name]
            continue
        kind, owner, field = keys
        states, groups = optimizers.setdefault(part, ({}, {}))
        (states if kind == "state" else groups).setdefault(owner, {})[field] = values[name]
    checkpoint: dict[str, Any] = torch.load(folder / META, map_location="cpu", weights_only=True)
    states_in_order = [_by_place(*optimizers[part]) for part in sorted(optimizers)]
    return checkpoint | {"state_dict": weights, "optimizer_states": states_in_order}


def _by_place(states: dict[str, Any], groups: dict[int, Any]) -> dict[str, Any]:
    """An optimizer's state as torch.optim has it: by the parameters' places in its groups, not by their names."""
    names = [name for place in sorted(groups) for name in groups[place]["params"]]
    places = {name: place for place, name in enumerate(names)}
    return {
        "state": {places[name]: state for name, state in states.items()},
        "param_groups": [
            groups[place] | {"params": [places[name] for name in groups[place]["params"]]} for place in sorted(groups)
        ],
    }


def saved_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's state_dict in a sharded checkpoint, without values: its tensors are on the meta device."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    states: dict[str, Any] = {}
    settings: dict[str, None] = {}
    for name, (part, *keys) in metadata.planner_data.items():
        if part == "state_dict":
            continue
        kind, owner, field = keys
        stored = metadata.state_dict_metadata[name]
        if kind == "param_groups":
            settings[field] = None
        elif isinstance(stored, TensorStorageMetadata):
            states.setdefault(owner, {})[field] = torch.empty(stored.size, device="meta")
    return {"state": states, "param_groups": [settings]}
