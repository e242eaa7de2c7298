"""The variants of a training step that scripts/bench/step.py compares, and their names."""

from dataclasses import dataclass

from fa_train.config_options import options

VARIANTS = (
    "ours-none-compiled",
    "ours-none",
    "ours-selective-compiled",
    "ours-full-compiled",
    "ours-offload-compiled",
    "hf",
    "hf-checkpointing",
    "hf-compiled",
    "hf-compiled-checkpointing",
    "hf-fa_train",
    "hf-fa_train-checkpointing",
)


@dataclass(frozen=True)
class Variant:
    """One implementation of a training step, and its settings.

    `memory`, `portable` and `float8` apply only to our model. `checkpointing` and `fa_train` apply only to
    Hugging Face's model.
    """

    ours: bool
    memory: str = "none"
    compiled: bool = False
    portable: bool = False
    checkpointing: bool = False
    fa_train: bool = False  # whether transformers runs with our attention
    float8: bool = False

    @property
    def is_peer(self) -> bool:
        """Whether the variant is a peer: neither its model nor its attention is ours."""
        return not self.ours and not self.fa_train


def variant_of(name: str) -> Variant:
    """Parses a variant's name. Raises: ValueError if `name` is not the name of a variant."""
    kind, *settings = name.split("-")
    memories = options("memory")
    if kind == "hf" and settings in ([*first, *last] for first in _KINDS for last in ([], ["checkpointing"])):
        return Variant(
            ours=False,
            compiled="compiled" in settings,
            checkpointing="checkpointing" in settings,
            fa_train="fa_train" in settings,
        )
    if kind == "ours" and settings and settings[0] in memories and _is_known(set(settings[1:])):
        return Variant(True, settings[0], "compiled" in settings, "portable" in settings, float8="float8" in settings)
    raise ValueError(
        "a variant must be hf[-compiled|-fa_train][-checkpointing] or ours-MEMORY[-compiled[-float8]][-portable] with "
        f"MEMORY one of {', '.join(memories)}; got {name}"
    )


def _is_known(settings: set[str]) -> bool:
    return settings <= {"compiled", "portable", "float8"} and ("compiled" in settings or "float8" not in settings)


_KINDS: tuple[list[str], ...] = ([], ["compiled"], ["fa_train"])
