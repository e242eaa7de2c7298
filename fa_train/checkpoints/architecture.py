"""Compares a run's settings with the settings in its checkpoint.

Some settings, such as model.rope_theta and adapter.lora_alpha, change what a model computes, but not the shapes of its
weights.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fa_train.checkpoints.files import CheckpointError
from fa_train.models.config import ModelConfig
from fa_train.settings import shown

ARCHITECTURE = "architecture"  # a checkpoint stores ModelConfig.values() under this key
ADAPTER = "adapter"  # a checkpoint stores fa_train.models.lora.adapter_values(model) under this key


def require_same_head(config: ModelConfig, stored: Mapping[str, Any] | None) -> None:
    """Raises: CheckpointError if model.tied differs between the run and the checkpoint.

    The head of a tied model shares its weight with the token embedding.
    stored: the architecture in the checkpoint, or None for a checkpoint of an older version.
    """
    if stored is not None and stored["tied"] != config.tied:
        changed = difference("model.tied", config.tied, stored["tied"])
        raise CheckpointError(f"{changed}. Use the setting of the checkpoint")


def differences(
    node: str,
    own: Mapping[str, Any],
    stored: Mapping[str, Any] | None,
    owner: str = "this run",
    chosen: Collection[str] = (),
) -> list[str]:
    """Returns one line of text for each setting that differs between a run and its checkpoint.

    node: the config node of the settings, for example "model".
    own, stored: the settings of the run and of the checkpoint, as {name: value}. If an older version of fa_train wrote
    the checkpoint, `stored` is None.
    owner: the words that the returned text uses for the run, for example "this run" or "the export".
    chosen: the keys of settings that are not compared, for example "model.rope_scaling".
    """
    if stored is None:
        return []
    names = (own.keys() | stored.keys()) - {"init"}  # `init` affects only new weights, not loaded weights
    return [
        difference(f"{node}.{name}", own.get(name), stored.get(name), owner)
        for name in sorted(names)
        if own.get(name) != stored.get(name) and not any(f"{node}.{name}.".startswith(f"{key}.") for key in chosen)
    ]


def difference(key: str, own: Any, stored: Any, owner: str = "this run") -> str:
    """Returns one line of text about a setting whose value differs between a run and its checkpoint."""
    return f"the checkpoint was written with {key}={shown(stored)}; {owner} has {shown(own)}"
