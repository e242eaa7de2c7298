"""The frozen base model of an adapter.

The checkpoint of a run with an adapter holds the name and hash of the pretrained base model, but not the base model's
weights. If the base model's weights are random, the checkpoint holds all weights.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fa_train.checkpoints.architecture import ARCHITECTURE, require_same_head
from fa_train.checkpoints.files import CheckpointError, Shapes, require_same_shapes, shapes
from fa_train.models.gpt import GPT
from fa_train.models.hf.weights import weight_files
from fa_train.models.origin import Origin

REFERENCE = "base_model"  # a checkpoint stores the name and hash of the base model under this key
PREFIX = "model."  # the prefix of the GPT's weight names in LitGPT's state_dict


def drop_base(model: GPT, checkpoint: dict[str, Any]) -> None:
    """Removes the frozen weights of LoRA from LitGPT's checkpoint, and stores a reference to the base model instead.

    The reference holds the base model's name, hash and vocabulary size. If `model.base_weights` is empty, drop_base
    does not change `checkpoint`. Weights that were frozen in another way may have been trained before, so they are
    kept.
    """
    if not model.base_weights:
        return
    assert model.origin is not None, "LoRA sets base_weights only for a model with an origin"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in model.base_weights and not parameter.requires_grad:
            checkpoint["state_dict"].pop(PREFIX + name, None)
    checkpoint[REFERENCE] = {
        "name": str(model.origin.pretrained),
        "sha256": base_hash(model.origin),
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
    if reference is None:
        return
    sha256 = None if model.origin is None else base_hash(model.origin)
    if sha256 != reference["sha256"]:
        got = f"{model.origin.pretrained} with SHA-256 {sha256[:12]}…" if model.origin and sha256 else "random weights"
        raise CheckpointError(
            f"{checkpoint} needs the base model that its adapter was trained on: {reference['name']} with SHA-256 "
            f"{reference['sha256'][:12]}…; got {got}"
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


def base_hash(origin: Origin) -> str:
    """Returns the SHA-256 of the base model's config.json and weight files.

    The hash does not depend on precision, 4-bit quantization or sharding. A process reads each weight file only once.
    """
    assert origin.folder is not None, "load_pretrained sets it"
    digest = hashlib.sha256()
    for path in (origin.folder / "config.json", *weight_files(origin.folder)):
        state = path.stat()
        digest.update(f"{path.name} {_file_hash(path, state.st_size, state.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@cache
def _file_hash(path: Path, size: int, modified: int) -> str:
    """Returns the SHA-256 of a file. If the size or the time of modification changes, the file is hashed again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
