"""The frozen base model of an adapter.

The checkpoint of a run with an adapter holds the name and hash of the base model, but not the base model's weights.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa_train.checkpoints.architecture import ARCHITECTURE, require_same_head
from fa_train.checkpoints.files import CheckpointError, Shapes, require_same_shapes, shapes
from fa_train.models.gpt import GPT
from fa_train.models.hf.weights import weight_files

REFERENCE = "base_model"  # a checkpoint stores the name and hash of the base model under this key
PREFIX = "model."  # the prefix of the GPT's weight names in LitGPT's state_dict


def drop_base(model: GPT, checkpoint: dict[str, Any], device: torch.device) -> None:
    """Removes the frozen weights of LoRA from LitGPT's checkpoint, and stores a reference to the base model instead.

    The reference holds the base model's name, hash and vocabulary size. If LoRA has frozen no weights, drop_base does
    not change `checkpoint`. Weights that were frozen in another way may have been trained before, so they are kept.
    device: the device that drew the base model's random weights. CPUs and GPUs draw different weights from the same
    seed.
    """
    if not model.base_weights:
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in model.base_weights and not parameter.requires_grad:
            checkpoint["state_dict"].pop(PREFIX + name, None)
    checkpoint[REFERENCE] = {
        "name": name_of(model),
        "sha256": base_hash(model),
        "drawn_on": None if _has_files(model) else device.type,
        "vocab_size": model.config.vocab_size,
    }


def restore_base(model: GPT, checkpoint: dict[str, Any]) -> None:
    """Adds the model's frozen weights to LitGPT's checkpoint if the checkpoint holds only a reference to them.

    Raises: CheckpointError if the checkpoint's weights and the model's weights differ in their names or shapes, or if
    the checkpoint's adapter was trained on another base model.
    """
    weights = checkpoint.get("state_dict")
    if weights is None:  # FullyShardedStrategy has already loaded and checked the weights
        return
    require_fit(model, shapes(weights), checkpoint, "the checkpoint")
    if REFERENCE in checkpoint:
        own = {PREFIX + name: weight for name, weight in model.state_dict().items()}
        checkpoint["state_dict"] = own | weights


def require_fit(model: GPT, stored: Shapes, content: Mapping[str, Any], checkpoint: str) -> None:
    """Checks that a checkpoint fits the model.

    A checkpoint holds all weights, or only the adapters and a reference to the base model.

    stored: {name in LitGPT's state_dict: shape} for each weight in the checkpoint.
    content: the entries of the checkpoint, for example the reference to the base model. `content` need not contain the
    weights.
    checkpoint: the checkpoint's name, for error messages.
    Raises: CheckpointError if the checkpoint does not fit the model. The error names the first difference between the
    checkpoint and the model.
    """
    require_same_weights(model, stored, content, checkpoint)
    reference = content.get(REFERENCE)
    if reference is not None and base_hash(model) != reference["sha256"]:
        raise CheckpointError(
            f"{checkpoint} needs the base model that its adapter was trained on: {reference['name']} with SHA-256 "
            f"{reference['sha256'][:12]}…; got {name_of(model)} with SHA-256 {base_hash(model)[:12]}…"
        )


def require_same_weights(model: GPT, stored: Shapes, content: Mapping[str, Any], checkpoint: str) -> None:
    """Checks the names and shapes of a checkpoint's weights. Does not check the base model of an adapter.

    stored, content, checkpoint: as in require_fit.
    Raises: CheckpointError if a name or a shape differs from the model's. The error names the first difference between
    the checkpoint and the model.
    """
    require_same_head(model.config, content.get(ARCHITECTURE))
    reference = content.get(REFERENCE)
    # A checkpoint may store the weight of a tied head twice, or only under the embedding's name.
    if model.config.tied:
        stored = {name: shape for name, shape in stored.items() if name != f"{PREFIX}head.weight"}
    own = {
        name: p
        for name, p in model.named_parameters()
        # a checkpoint of an earlier version lacks all frozen weights, not only those in `base_weights`
        if p.requires_grad or reference is None or (name not in model.base_weights and PREFIX + name in stored)
    }
    require_same_shapes({PREFIX + name: shape for name, shape in shapes(own).items()}, stored, checkpoint)


def base_hash(model: GPT) -> str:
    """Returns the SHA-256 of the base model.

    The hash covers config.json and the weight files. For a base model without files, the hash covers its random
    weights.

    The hash does not depend on precision, 4-bit quantization or sharding. A process reads each weight file only once.
    """
    if not _has_files(model):
        assert model.random_base_hash is not None, "LoRA sets it"
        return model.random_base_hash
    assert model.origin is not None and model.origin.folder is not None
    digest = hashlib.sha256()
    for path in (model.origin.folder / "config.json", *weight_files(model.origin.folder)):
        state = path.stat()
        digest.update(f"{path.name} {_file_hash(path, state.st_size, state.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def hash_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the SHA-256 of the names, shapes, dtypes and elements of weights."""
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_of(model: GPT) -> str:
    """Returns the base model's name for messages to the user."""
    return str(model.origin.pretrained) if _has_files(model) and model.origin else "weights drawn from a seed"


def _has_files(model: GPT) -> bool:
    return model.origin is not None and model.origin.folder is not None


@cache
def _file_hash(path: Path, size: int, modified: int) -> str:
    """Returns the SHA-256 of a file. If the size or the time of modification changes, the file is hashed again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
