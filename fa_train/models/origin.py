"""Where the weights of a model come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Origin:
    """The Hugging Face checkpoint from which the model's weights were loaded.

    An export writes `config` and `generation_config` to files.
    config: config.json with the run's RoPE settings, and without the part for the image encoder.
    has_images: whether the checkpoint also has an image encoder.
    has_new_rope: whether the run's settings replaced the checkpoint's RoPE.
    """

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    pretrained: str | None = None  # the folder or hub name that the user gave
    folder: Path | None = None  # the folder with the checkpoint's files
    has_images: bool = False
    has_new_rope: bool = False

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text. config.json is read only if generation_config.json names no end tokens."""
        found = (self.generation_config or {}).get("eos_token_id")
        found = self.config.get("eos_token_id") if found is None else found
        if found is None:
            return []
        return list(found) if isinstance(found, list) else [found]
