"""Compares the architecture of a run with that of the checkpoint that it resumes from.

Some settings, such as rope_theta, change what a model computes, but not the shapes of its weights.
"""

from collections.abc import Mapping
from typing import Any

from fa_train.checkpoints.files import CheckpointError
from fa_train.models.config import ModelConfig
from fa_train.settings import shown

ARCHITECTURE = "architecture"  # a checkpoint stores ModelConfig.values() under this key


def differences(config: ModelConfig, stored: Mapping[str, Any] | None) -> list[str]:
    """Returns one line for each setting of the architecture in which a run differs from its checkpoint.

    stored: the architecture in the checkpoint, or None for a checkpoint of an older version.
    Raises: CheckpointError if only the run or only the checkpoint shares the head's weight with the token embedding.
    """
    if stored is None:
        return []
    own, lines = config.values(), []
    for name in sorted((own.keys() | stored.keys()) - {"init"}):  # a resumed run draws no weights
        if own.get(name) != stored.get(name):
            written, got = shown(stored.get(name)), shown(own.get(name))
            lines.append(f"the checkpoint was written with model.{name}={written}; this run has {got}")
            if name == "tied":
                raise CheckpointError(f"{lines[-1]}. Use the model settings of the run that wrote it")
    return lines
