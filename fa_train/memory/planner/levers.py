"""Which levers make a run fit, what they cost in time, and how long a sequence they allow: a search by prediction.

There are few enough combinations of levers to ask fa_train.memory.planner about each. `memory=auto` is the one that
costs the least time of those that fit. Times are arithmetic too, of what the levers add and of nothing else;
tests/memory/planner/test_levers.py holds them against steps measured on an H200.
"""

from dataclasses import dataclass, replace
from typing import Any, get_args

from fa_train.memory.checkpointing import Checkpointing
from fa_train.memory.offload import Offloaded
from fa_train.memory.planner.block import keeps_up
from fa_train.memory.planner.plan import Prediction, predict, sent_per_layer
from fa_train.memory.planner.shape import OptimizerKind, Shape
from fa_train.memory.planner.weights import MATRICES, block_sizes

MLP_CHUNK = 16384  # tokens: large enough to fill a GPU
LINK = 5e10  # bytes a second to and from the host; about an H200's
# bf16 products a second: by what selective adds to none in scripts/results/memory_llama_1b_32k_h200_202611.md
FLOPS = 7e14
# of attention's forward, which full checkpointing does again: by what that adds to selective there and in
# memory_llama_1b_131k_h200_202611.md
ATTENTION_FLOPS = 5.5e14
# What offload and mlp_chunk cost there is less than can be measured. These decide between what is as fast, chunks
# before copies, which take pinned host memory: the part of forward and backward that copies beside them cost, and the
# seconds that one more chunk of the FFN does.
BESIDE_COPIES, LAUNCH = 0.002, 2e-5


@dataclass(frozen=True)
class Levers:
    """What can be given up for memory, by the names that Memory and conf/memory have for it."""

    checkpointing: Checkpointing
    offload: Offloaded
    mlp_chunk: int | None

    def overrides(self, others: "Levers") -> list[str]:
        """As train.py takes them, those that differ from `others`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return [f"memory.{name}={_yaml(value)}" for name, value in values.items() if value != getattr(others, name)]


COMBINATIONS = [
    Levers(checkpointing, offload, mlp_chunk)
    for checkpointing in get_args(Checkpointing)
    for offload in (False, True)
    for mlp_chunk in (None, MLP_CHUNK)
] + [Levers("none", "all", mlp_chunk) for mlp_chunk in (None, MLP_CHUNK)]


def fits(prediction: Prediction, gpu_bytes: int, host_bytes: int) -> bool:
    """Whether a GPU of so many bytes, and the host's memory for its process, hold it."""
    return prediction.gpu_bytes <= gpu_bytes and prediction.host <= host_bytes


def with_levers(shape: Shape, levers: Levers) -> Shape:
    """The same run under other levers."""
    return replace(shape, checkpointing=levers.checkpointing, offload=levers.offload, mlp_chunk=levers.mlp_chunk)


def levers_of(shape: Shape) -> Levers:
    """The run's own."""
    return Levers(shape.checkpointing, shape.offload, shape.mlp_chunk)


def longest_seq_len(shape: Shape, gpu_bytes: int, host_bytes: int) -> int:
    """The most tokens of one micro-batch that fit, in one row; 0 where not even one does."""

    def holds(tokens: int) -> bool:
        return fits(predict(replace(shape, tokens=tokens)), gpu_bytes, host_bytes)

    if not holds(1):
        return 0
    fitting, beyond = 1, 2
    while holds(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if holds(middle) else (fitting, middle)
    return fitting


def longest_of_all_levers(shape: Shape, gpu_bytes: int, host_bytes: int) -> int:
    """The same under whichever levers reach farthest: up to there memory=auto finds some."""
    return max(longest_seq_len(with_levers(shape, levers), gpu_bytes, host_bytes) for levers in COMBINATIONS)


def extra_seconds(shape: Shape) -> float:
    """What the levers add to a micro-batch of one document, roughly: work done twice, and waiting for the host."""
    s = shape
    qkv_weight, out_weight, up_weight, down_weight = block_sizes(s)[:MATRICES]
    attention = 2 * s.tokens**2 * s.query_dim / ATTENTION_FLOPS  # its forward, causal
    projections = 2 * s.tokens * (qkv_weight + out_weight) / FLOPS
    up, down = (2 * s.tokens * weight / FLOPS for weight in (up_weight, down_weight))
    seconds = 0.0
    if s.checkpointing != "none":
        seconds += projections + (0 if s.mlp_chunk else up)
    if s.checkpointing == "full":
        seconds += attention
    if s.mlp_chunk:
        seconds += (0 if keeps_up(s) else up) + LAUNCH * (s.tokens / s.mlp_chunk)
    if s.offload:
        forward, copy = attention + projections + up + down, sent_per_layer(s) / LINK
        seconds += max(0.0, copy - forward) + max(0.0, copy - 2 * forward) + BESIDE_COPIES * 3 * forward
    return s.n_layers * seconds


def fastest_that_fits(shape: Shape, gpu_bytes: int, host_bytes: int) -> Levers | None:
    """The levers of `memory=auto`: of all that fit, those that cost the least time; None where none do."""
    fitting = [
        (extra_seconds(candidate), index)
        for index, candidate in enumerate(with_levers(shape, levers) for levers in COMBINATIONS)
        if fits(predict(candidate), gpu_bytes, host_bytes)
    ]
    return COMBINATIONS[min(fitting)[1]] if fitting else None


def next_lever(shape: Shape, gpu_bytes: int, host_bytes: int, rows: int = 1) -> str:
    """What to change where a run does not fit, as train.py's overrides, cheapest first; "" where it fits.

    Fewer of a micro-batch's `rows` first, then levers, the optimizer's states and the precision; where all that is not
    enough, the longest seq_len.
    """
    seq_len = shape.tokens // rows
    for fewer in (n for n in range(rows, 0, -1) if rows % n == 0):
        if fits(predict(replace(shape, tokens=seq_len * fewer)), gpu_bytes, host_bytes):
            return "" if fewer == rows else f"data.micro_batch_size={fewer}"
    shape = replace(shape, tokens=seq_len)
    one_row = ["data.micro_batch_size=1"] if rows > 1 else []
    changes = _changes(shape)
    for overrides, change in changes:
        changed = replace(shape, **change)
        levers = fastest_that_fits(changed, gpu_bytes, host_bytes)
        if levers is not None:
            return " ".join(one_row + levers.overrides(levers_of(shape)) + overrides)
    longest = {
        longest_seq_len(with_levers(replace(shape, **change), levers), gpu_bytes, host_bytes): (overrides, levers)
        for overrides, change in reversed(changes)
        for levers in reversed(COMBINATIONS)
    }
    tokens = max(longest)
    if not tokens:
        return "a smaller model"
    overrides, levers = longest[tokens]
    return " ".join([f"seq_len={tokens}", *one_row, *levers.overrides(levers_of(shape)), *overrides])


def _changes(shape: Shape) -> list[tuple[list[str], dict[str, Any]]]:
    """None, smaller states of the optimizer, and half the bytes of a weight: overrides, and what they do to the shape.

    Sharded weights take no optimizer that shards its states itself (fa_train.preflight.require_shardable).
    """
    changes: list[tuple[list[str], dict[str, Any]]] = [([], {})]
    if shape.ranks > 1:
        if shape.precision != "bf16-true":
            # adapters stay fp32, and stochastic rounding is of bf16 weights
            optimizer: OptimizerKind = "adamw" if shape.adapters else "adamw_bf16"
            overrides = [] if optimizer == shape.optimizer else [f"optimizer={optimizer}"]
            half: dict[str, Any] = {"optimizer": optimizer, "precision": "bf16-true"}
            changes += [([*overrides, "trainer.precision=bf16-true"], half)]
        return changes
    if shape.optimizer == "adamw":
        changes += [(["optimizer=adamw_8bit"], {"optimizer": "adamw_8bit"})]
        changes += [(["optimizer=adamw_offload"], {"optimizer": "adamw_offload"})]
    if shape.precision != "bf16-true":
        smallest: dict[str, Any] = {"optimizer": "adamw_8bit", "precision": "bf16-true"}
        changes += [(["optimizer=adamw_8bit", "trainer.precision=bf16-true"], smallest)]
    return changes


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
