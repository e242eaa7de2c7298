"""The combinations of memory levers that scripts/bench/memory.py measures, and a measurement's result."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scripts.bench.training_case import CONF, Device

SEQ_LENS = (32768, 131072)
MLP_CHUNK = 16384  # tokens, as in conf/memory/offload.yaml
LOSS_CHUNK = 4096  # tokens, as in conf/memory/default.yaml
# each beside what it is compared with, the most wanted first: a budget may end the run
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
PROFILED = ("selective", "selective+offload")
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
    """One combination; mlp_chunk and loss_chunk in tokens, None for all at once."""

    checkpointing: str = "none"
    offload: bool = False
    mlp_chunk: int | None = None
    loss_chunk: int | None = LOSS_CHUNK
    optimizer: str = "adamw"
    precision: str = "bf16-mixed"

    @property
    def name(self) -> str:
        """As levers_of reads it."""
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
        """The same with `lever` off; None where it is off already."""
        return replace(self, **{lever: OFF[lever]}) if getattr(self, lever) != OFF[lever] else None


@dataclass(frozen=True)
class Case:
    model: str
    seq_len: int  # tokens, one document
    combination: str
    device: Device
    attention: str
    compiled: bool
    steps: int  # timed ones
    slow_step: float  # seconds, from which a case times FEWEST_STEPS
    overrides: tuple[str, ...] = ()
    trace: str = ""  # where the trace of one more step goes


@dataclass(frozen=True)
class Row:
    """One measurement; numbers are None and lists are empty unless outcome is "ok"."""

    seq_len: int
    combination: str
    outcome: str  # "ok", "out of memory" or "failed: REASON"
    step_ms: list[float] = field(default_factory=list)  # of each timed step
    optimizer_ms: list[float] = field(default_factory=list)  # of that, in the optimizer
    peak_gib: float | None = None
    host_gib: float | None = None
    loss: float | None = None  # nats a label, of the last step
    overlap: dict[str, float] | None = None  # fields of Overlap, where the case wanted a trace of a GPU


def levers_of(name: str) -> Levers:
    """From a combination's name. Raises: ValueError on a name that is none."""
    checkpointing, *parts = name.split("+")
    optimizers = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
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
            f"a combination is none, selective or full, then of +offload, +mlp_chunk[=TOKENS], +loss_chunk=TOKENS|all, "
            f"+bf16-true, +{', +'.join(optimizers)}; got {name}"
        )
    return Levers(**found)
