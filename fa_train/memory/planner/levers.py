"""Finds memory levers (settings that reduce GPU memory) that make a run fit, and the longest sequence that fits.

The search predicts the memory of every combination of levers. `memory=auto` chooses the fastest combination that fits.
A formula estimates the extra time of each combination. tests/memory/planner/test_levers.py compares the estimated times
with step times that were measured on an H200.
"""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

from fa_train.bounds import Precision
from fa_train.memory.checkpointing import Checkpointing
from fa_train.memory.memory import Levers
from fa_train.memory.planner.block import BlockBytes, keeps_up
from fa_train.memory.planner.plan import Plan, RunSize
from fa_train.memory.planner.predict import Prediction, predict
from fa_train.models.float8 import MULTIPLE
from fa_train.optim.adamw import OptimizerKind
from fa_train.settings import shown

GATHERED_SHARE = 0.9  # a plan with gathered blocks may use this share of GPU memory, because predictions can be too low
MLP_CHUNK = 16384  # the number of tokens per chunk, enough to fill a GPU
# Each chunk of the loss reads and writes the fp32 gradient of the last linear layer's weight. If a chunk has fewer than
# about 600 tokens, an H200 needs more time to read and write this gradient than to compute it.
LOSS_CHUNK = 1024  # tokens
LINK = 5e10  # bytes per second between GPU and host, about the rate of an H200
# FLOP/s of bf16 matrix products, estimated from scripts/results/memory_llama_1b_h200_202611.md
FLOPS = 7e14
# FLOP/s of attention's forward, estimated from scripts/results/memory_llama_1b_h200_202611.md
ATTENTION_FLOPS = 5.5e14
# Copies to the host lengthen the compute time by the fraction BESIDE_COPIES. Each FFN chunk costs LAUNCH seconds. The
# two costs make the search prefer FFN chunks over equally fast copies, because copies to the host need pinned memory.
BESIDE_COPIES, LAUNCH = 0.002, 2e-5  # estimates of two costs that are too small to measure

COMBINATIONS = [
    Levers(checkpointing, offload, mlp_chunk)
    for checkpointing in get_args(Checkpointing)
    for offload in (False, True)
    for mlp_chunk in (None, MLP_CHUNK)
] + [Levers("none", "all", mlp_chunk) for mlp_chunk in (None, MLP_CHUNK)]


def fastest_that_fits(plan: Plan, gpu_bytes: int, host_bytes: int) -> Levers | None:
    """Returns the fastest levers that fit, or None if no levers fit. `memory=auto` uses the result."""
    candidates = combinations(plan)
    fitting = [
        (extra_seconds(candidate), index)
        for index, candidate in enumerate(with_levers(plan, levers) for levers in candidates)
        if fits(predict(candidate), gpu_bytes, host_bytes)
    ]
    return candidates[min(fitting)[1]] if fitting else None


def combinations(plan: Plan) -> list[Levers]:
    """Returns the combinations of levers that the run supports.

    With float8, fa_train.models.float8.require_float8_model refuses levers with an mlp_chunk or offload="all".
    With lora_dropout above 0, LoRA (fa_train.models.lora) refuses levers that recompute, because recomputing would draw
    other random numbers.
    """
    adapters, supported = plan.run.adapters, COMBINATIONS
    if plan.run.float8:
        supported = [levers for levers in supported if levers.mlp_chunk is None and not levers.offloads_all]
    if adapters is not None and adapters.has_dropout:
        supported = [levers for levers in supported if levers.checkpointing == "none" and levers.mlp_chunk is None]
    return supported


def fits(prediction: Prediction, gpu_bytes: int, host_bytes: int) -> bool:
    """Returns whether the predicted memory fits in gpu_bytes on the GPU and host_bytes on the host."""
    return prediction.gpu_bytes <= gpu_bytes and prediction.host <= host_bytes


def extra_seconds(plan: Plan) -> float:
    """Estimates how many seconds the levers add to a micro-batch that is one document.

    The additional time is spent on recomputing activations, and on waiting for copies between GPU and host.
    """
    levers, tokens = plan.levers, plan.run.tokens
    qkv_weight, out_weight, up_weight, down_weight = plan.model.block_matrices
    attention = 2 * tokens**2 * plan.model.query_dim / ATTENTION_FLOPS  # causal forward
    projections = 2 * tokens * (qkv_weight + out_weight) / FLOPS
    up, down = (2 * tokens * weight / FLOPS for weight in (up_weight, down_weight))
    seconds = 0.0
    if levers.checkpointing != "none":
        seconds += projections + (0 if levers.mlp_chunk else up)
    if levers.checkpointing == "full":
        seconds += attention
    if levers.mlp_chunk:
        seconds += (0 if keeps_up(plan) else up) + LAUNCH * (tokens / levers.mlp_chunk)
    if levers.offload:
        forward, copy = attention + projections + up + down, BlockBytes(plan).offloaded() / LINK
        seconds += max(0.0, copy - forward) + max(0.0, copy - 2 * forward) + BESIDE_COPIES * 3 * forward
    return plan.model.n_layers * seconds


def with_levers(plan: Plan, levers: Levers) -> Plan:
    """Returns a copy of the plan with other levers."""
    return replace(plan, levers=levers)


def resized(plan: Plan, **changes: Any) -> Plan:
    """Returns a copy of the plan with changed fields of RunSize."""
    return replace(plan, run=replace(plan.run, **changes))


def longest_seq_len(plan: Plan, gpu_bytes: int, host_bytes: int) -> int:
    """Returns the longest seq_len that fits with the plan's number of rows, or 0 if no seq_len fits.

    With float8, the returned seq_len is a multiple of 16.
    """

    def holds(seq_len: int) -> bool:
        return fits(predict(resized(plan, seq_len=seq_len)), gpu_bytes, host_bytes)

    if not holds(1):
        return 0
    fitting, beyond = 1, 2
    while holds(beyond):
        fitting, beyond = beyond, 2 * beyond
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if holds(middle) else (fitting, middle)
    return fitting - fitting % MULTIPLE if plan.run.float8 else fitting


def longest_of_all_levers(plan: Plan, gpu_bytes: int, host_bytes: int) -> int:
    """Returns the longest seq_len that fits with the best combination of levers."""
    return max(longest_seq_len(with_levers(plan, levers), gpu_bytes, host_bytes) for levers in combinations(plan))


def smallest(plan: Plan) -> Levers:
    """Returns the combination of levers that needs the least GPU memory."""
    return min(combinations(plan), key=lambda levers: predict(with_levers(plan, levers)).gpu_bytes)


def with_blocks_gathered(plan: Plan, gpu_bytes: int) -> Plan:
    """Returns a plan in which the blocks of a sharded run stay gathered between forward and backward.

    Returns `plan` unchanged if the run is not sharded, or if a step with gathered blocks would need more
    than `GATHERED_SHARE` of the GPU's memory. strategy.reshard_after_forward=auto uses the result.
    """
    gathered = resized(plan, reshard_after_forward=False)
    return gathered if plan.run.ranks > 1 and predict(gathered).gpu_bytes <= GATHERED_SHARE * gpu_bytes else plan


def next_lever(plan: Plan, gpu_bytes: int, host_bytes: int, attention: str = "flash") -> str:
    """Returns command-line overrides of train.py that make a run fit, or "" if the run already fits.

    attention: the name of the chosen option of conf/attention.
    The number of rows per step stays the same, so fewer rows per micro-batch mean more micro-batches per step.
    The function tries these changes in order: blocks that do not stay gathered, fewer rows per micro-batch, smaller
    chunks of the loss, other levers, attention with one KV head at a time, bf16 weights with fp32 master weights,
    smaller optimizer states, and a lower precision. If no change makes the run fit, the returned overrides also set
    seq_len to the longest sequence that fits. If no sequence fits, the function returns the text "a smaller model".
    """
    start = resized(plan, reshard_after_forward=True) if plan.run.ranks > 1 else plan
    sizes = product(_loss_chunks(start.run), _micro_batches(start))
    for candidate in (plan, *(resized(sized, loss_chunk=loss_chunk) for loss_chunk, sized in sizes)):
        if fits(predict(candidate), gpu_bytes, host_bytes):
            return _overrides(plan, candidate)
    # A step with a single micro-batch does not accumulate gradients, so a micro-batch of all rows can need less memory
    # than micro-batches of one row.
    for smaller in _with_smaller_tensors(start, attention):
        for candidate in reversed(_micro_batches(smaller)):
            levers = fastest_that_fits(candidate, gpu_bytes, host_bytes)
            if levers is not None:
                return _overrides(plan, with_levers(candidate, levers))
    # With float8, a micro-batch of one row needs a seq_len that is a multiple of 16.
    one_row = _micro_batches(resized(start, seq_len=MULTIPLE))[-1]
    candidates = [
        with_levers(smaller, levers)
        for smaller in _with_smaller_tensors(one_row, attention)
        for levers in combinations(plan)
    ]
    lengths = [longest_seq_len(candidate, gpu_bytes, host_bytes) for candidate in candidates]
    seq_len = max(lengths)
    best = candidates[lengths.index(seq_len)]  # the cheapest of the candidates with this length
    return _overrides(plan, resized(best, seq_len=seq_len)) if seq_len else "a smaller model"


def _overrides(plan: Plan, changed: Plan) -> str:
    """Returns the overrides of train.py that turn `plan` into `changed`."""
    before, after = _settings(plan), _settings(changed)
    return " ".join(f"{name}={shown(value)}" for name, value in after.items() if value != before[name])


def _settings(plan: Plan) -> dict[str, Any]:
    """Returns the settings that next_lever may change, by their names in train.py's overrides."""
    run, levers = plan.run, plan.levers
    return {
        "strategy.reshard_after_forward": "auto" if run.reshard_after_forward else False,
        "seq_len": run.seq_len,
        "data.micro_batch_size": run.rows,
        "memory.checkpointing": levers.checkpointing,
        "memory.offload": levers.offload,
        "memory.mlp_chunk": levers.mlp_chunk,
        "memory.loss.chunk_size": run.loss_chunk,
        "strategy.head_groups": run.head_groups,
        "optimizer": run.optimizer,
        "trainer.precision": run.precision,
    }


def _micro_batches(plan: Plan) -> list[Plan]:
    """Returns a plan for each supported number of rows per micro-batch. The first is `plan`; the last has fewest rows.

    The number of rows per step stays the same. With float8, the number of tokens of a micro-batch must be a multiple of
    16 (fa_train.preflight.require_float8).
    """
    run = plan.run
    counts = [n for n in range(run.rows - 1, 0, -1) if run.rows % n == 0]
    if run.float8:
        counts = [n for n in counts if run.seq_len * n % MULTIPLE == 0]
    return [plan, *(resized(plan, rows=n, accumulates=True) for n in counts)]


def _with_smaller_tensors(plan: Plan, attention: str) -> list[Plan]:
    """Returns plans with other values of loss_chunk, head_groups, optimizer and precision, the cheapest first.

    attention: as in next_lever. The first plan is `plan`. fa_train.early_checks.require_head_groups refuses head_groups
    without strategy.context, and with other attention than flash.
    """
    run, heads = plan.run, plan.model.heads.kv
    groups = [run.head_groups]
    if run.context > 1 and run.head_groups != heads and attention == "flash":
        groups += [heads]
    return [
        resized(plan, optimizer=optimizer, precision=precision, head_groups=head_groups, loss_chunk=loss_chunk)
        for (optimizer, precision), head_groups, loss_chunk in product(_formats(run), groups, _loss_chunks(run))
    ]


def _loss_chunks(run: RunSize) -> list[int]:
    """Returns the run's loss_chunk, and also LOSS_CHUNK if it is smaller."""
    return [run.loss_chunk, LOSS_CHUNK] if run.loss_chunk > LOSS_CHUNK else [run.loss_chunk]


def _formats(run: RunSize) -> list[tuple[OptimizerKind, Precision]]:
    """Returns the run's optimizer and precision, and then those that need less memory.

    adamw_master and adamw_bf16 train only bf16 weights, so they cannot train adapters, which stay in fp32.
    strategy=fsdp supports neither adamw_8bit nor adamw_offload (fa_train.early_checks.require_shardable).
    """
    formats: list[tuple[OptimizerKind, Precision]] = [(run.optimizer, run.precision)]
    if run.optimizer == "adamw" and run.precision == "bf16-mixed" and run.adapters is None:
        formats += [("adamw_master", "bf16-true")]
    if run.ranks > 1:
        if run.precision != "bf16-true" or run.optimizer == "adamw_master":
            formats += [("adamw" if run.adapters else "adamw_bf16", "bf16-true")]
        return formats
    if run.optimizer in ("adamw", "adamw_master"):
        formats += [("adamw_8bit", run.precision), ("adamw_offload", run.precision)]
    if run.precision != "bf16-true":
        formats += [("adamw_8bit", "bf16-true")]
    return formats
