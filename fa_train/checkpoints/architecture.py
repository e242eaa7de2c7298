"""Compares a run's architecture with the architecture in its checkpoint.

Some settings, such as rope_theta, change what a model computes, but not the shapes of its weights.
"""

from collections.abc import Mapping
from typing import Any

from fa_train.checkpoints.files import CheckpointError
from fa_train.models.config import ModelConfig
from fa_train.settings import shown

ARCHITECTURE = "architecture"  # a checkpoint stores ModelConfig.values() under this key


def require_same_head(config: ModelConfig, stored: Mapping[str, Any] | None) -> None:
    """Raises: CheckpointError if model.tied differs between the run and the checkpoint.

    The head of a tied model shares its weight with the token embedding.
    stored: the architecture in the checkpoint, or None for a checkpoint of an older version.
    """
    if stored is not None and stored["tied"] != config.tied:
        raise CheckpointError(f"{_difference('tied', config.values(), stored)}. Use the setting of the checkpoint")


def differences(config: ModelConfig, stored: Mapping[str, Any] | None) -> list[str]:
    """Returns one line of text for each architecture setting that differs between a run and its checkpoint.

    stored: as in require_same_head.
    """
    if stored is None:
        return []
    own = config.values()
    names = (own.keys() | stored.keys()) - {"init"}  # a resumed run gets its weights from the checkpoint
    return [_difference(name, own, stored) for name in sorted(names) if own.get(name) != stored.get(name)]


def _difference(name: str, own: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    written, got = shown(stored.get(name)), shown(own.get(name))
    return f"the checkpoint was written with model.{name}={written}; this run has {got}"
