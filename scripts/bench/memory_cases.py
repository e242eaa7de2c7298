"""Defines the combinations of memory levers that scripts/bench/memory.py measures, and the result of a measurement."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fa_train.config_options import options

SEQ_LENS = (32768, 131072)
MLP_CHUNK = 16384  # tokens, as in conf/memory/offload.yaml
LOSS_CHUNK = 4096  # tokens, as in conf/memory/default.yaml
# Combinations that are compared with each other are neighbours in this list. The most important combinations come
# first, because the time budget can end the run early.
COMBINATIONS = (
    "selective",
    "selective+offload",
    "selective+mlp_chunk",
    "selective+offload+mlp_chunk",
    "full",
    "full+offload",
    "full+offload+mlp_chunk",
    "none",
    "selective+loss_chunk=all",
    "selective+loss_chunk=16384",
    "selective+adamw_8bit",
    "selective+adamw_offload",
    "selective+bf16-true",
    "selective+bf16-true+adamw_bf16",
)
Lever = Literal["checkpointing", "offload", "mlp_chunk", "loss_chunk", "optimizer"]
OFF: dict[Lever, Any] = {
    "checkpointing": "none",
    "offload": False,
    "mlp_chunk": None,
    "loss_chunk": None,
    "optimizer": "adamw",
}


@dataclass(frozen=True)
class Levers:
    """One combination. mlp_chunk and loss_chunk are numbers of tokens per chunk, or None for one chunk."""

    checkpointing: str = "none"
    offload: bool = False
    mlp_chunk: int | None = None
    loss_chunk: int | None = LOSS_CHUNK
    optimizer: str = "adamw"
    precision: str = "bf16-mixed"

    @property
    def name(self) -> str:
        """Returns the name of the combination, in the form that levers_of parses."""
        parts = [self.checkpointing]
        parts += ["offload"] if self.offload else []
        if self.mlp_chunk is not None:
            parts.append("mlp_chunk" if self.mlp_chunk == MLP_CHUNK else f"mlp_chunk={self.mlp_chunk}")
        if self.loss_chunk != LOSS_CHUNK:
            parts.append(f"loss_chunk={'all' if self.loss_chunk is None else self.loss_chunk}")
        parts += ["bf16-true"] if self.precision == "bf16-true" else []
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        return "+".join(parts)

    def without(self, lever: Lever) -> "Levers | None":
        """Returns this combination with `lever` off, or None if the lever is already off."""
        return replace(self, **{lever: OFF[lever]}) if getattr(self, lever) != OFF[lever] else None


@dataclass(frozen=True)
class Row:
    """One measurement.

    If the outcome is "ok", the row has all measured values. If the outcome is "out of memory", only peak_gib can have a
    value.
    """

    seq_len: int
    combination: str
    outcome: str  # "ok", "out of memory", or "failed" and the reason
    step_ms: list[float] = field(default_factory=list)  # of each timed step
    optimizer_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    host_gib: float | None = None
    loss: float | None = None  # loss of the last step, in nats per label


def levers_of(name: str) -> Levers:
    """Parses a combination's name. Raises: ValueError if `name` is not the name of a combination."""
    checkpointing, *parts = name.split("+")
    optimizers = options("optimizer")
    found: dict[str, Any] = {"checkpointing": checkpointing}
    known = checkpointing in ("none", "selective", "full")
    for part in parts:
        key, _, value = part.partition("=")
        if part == "offload":
            found["offload"] = True
        elif part == "mlp_chunk":
            found["mlp_chunk"] = MLP_CHUNK
        elif part == "loss_chunk=all":
            found["loss_chunk"] = None
        elif key in ("mlp_chunk", "loss_chunk") and value.isdecimal() and int(value) > 0:
            found[key] = int(value)
        elif part in optimizers:
            found["optimizer"] = part
        elif part == "bf16-true":
            found["precision"] = part
        else:
            known = False
    if not known:
        raise ValueError(
            f"a combination must be none, selective or full, then any of +offload, +mlp_chunk[=TOKENS], "
            f"+loss_chunk=TOKENS|all, +bf16-true, +{', +'.join(optimizers)}; got {name}"
        )
    return Levers(**found)
