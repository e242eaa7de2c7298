"""The cases of the attention ablation: a training step of a model, or attention alone.

A training step is a step of train.py's loop (scripts/bench/training_case.py). The first two runs of a case are warm-up
runs. If the time limit ends the case after two runs, only the first run is a warm-up run. On a CPU, peak memory is that
of the whole process. The FLOPs and MFU of a step are computed as in fa_train/flops.py, without recomputation. For
attention alone, a forward pass over N tokens counts `2 * n_heads * head_dim * N**2` FLOPs, and a backward pass counts
2.5 times as many.
"""

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.config_options import CONF
from fa_train.flops import peak_flops
from fa_train.models.attention import Attention, require_backend
from scripts.bench.training_case import (
    VOCABULARY,
    WARMUP,
    Device,
    StepTimes,
    memory_gib,
    step_flops,
    training_config,
)
from scripts.bench.training_case import measure as measure_ours

VOCABULARIES = {"nano": 259}  # vocabulary sizes that are not in the configs; nano has 256 bytes and 3 special tokens
REPLACEABLE = ("memory", "optimizer")  # config groups with a default option, which an override of a case can replace
Precision = Literal["bf16-mixed", "32-true"]
Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class StepCase:
    """One training step on one synthetic document of seq_len tokens."""

    KIND: ClassVar[str] = "step"
    COLUMNS: ClassVar[tuple[str, ...]] = ("attention", "seq_len")

    model: str
    attention: str
    seq_len: int
    device: Device
    precision: Precision
    steps: int  # maximum number of timed steps
    seconds: float  # time limit in seconds from the end of the first step, as in StepTimes.limit
    overrides: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.attention} {self.seq_len}"

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of the operands of matrix products."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float32

    @property
    def line(self) -> "StepCase":
        """Cases that differ only in seq_len have equal values of `line`."""
        return replace(self, seq_len=0)


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention alone, on one document: first the forward without autograd, then forward and backward."""

    KIND: ClassVar[str] = "attention"
    COLUMNS: ClassVar[tuple[str, ...]] = ("attention", "n_heads", "head_dim", "dtype", "seq_len")

    attention: str
    seq_len: int
    n_heads: int  # number of query heads, and also of KV heads
    head_dim: int
    dtype: Dtype
    device: Device
    steps: int
    seconds: float

    @property
    def shape(self) -> str:
        return f"{self.n_heads} heads of {self.head_dim}, {self.dtype}"

    @property
    def name(self) -> str:
        return f"attention {self.attention} {self.n_heads}x{self.head_dim} {self.dtype} {self.seq_len}"

    @property
    def operand_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def line(self) -> "AttentionCase":
        return replace(self, seq_len=0)


Case = StepCase | AttentionCase
KINDS: dict[str, type[StepCase] | type[AttentionCase]] = {kind.KIND: kind for kind in (StepCase, AttentionCase)}


@dataclass(frozen=True)
class Result:
    """The measured values of one case.

    If outcome is not "ok", all values except memory and forward_* are None. mfu is also None if the peak FLOP/s of the
    device is unknown. step_ms: the median time of a whole training step, or of attention's forward and backward
    together. forward_*: values of attention's forward pass alone, which are known even if the backward pass ran out of
    memory.
    """

    outcome: str  # "ok", "oom", "failed: REASON", "skipped: REASON" or "not run: REASON"
    peak_gib: float | None = None
    reserved_gib: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    timed_steps: int | None = None
    forward_peak_gib: float | None = None
    forward_ms: float | None = None

    @property
    def oom(self) -> bool:
        return self.outcome == "oom"

    @property
    def final(self) -> bool:
        """Returns whether a later sweep can use this result instead of running the case again."""
        return self.outcome in ("ok", "oom") or self.outcome.startswith("skipped")


def options_of(case: StepCase) -> dict[str, str]:
    """Returns the option that the case chooses in each config group."""
    groups = {"model": case.model, "attention": case.attention, "memory": "default", "optimizer": "adamw"}
    chosen = (override.partition("=") for override in case.overrides)
    return groups | {name: value for name, _, value in chosen if name in REPLACEABLE}


def configuration(case: StepCase) -> DictConfig:
    """Composes the model, attention, memory and optimizer config of the case."""
    groups = options_of(case)
    values = [override for override in case.overrides if override.partition("=")[0] not in REPLACEABLE]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[*(f"+{name}={value}" for name, value in groups.items()), *values])
    if config.model.vocab_size is None:
        config.model.vocab_size = VOCABULARIES.get(case.model, VOCABULARY)
    return config


def measure(case: Case) -> Result:
    """Runs the case in this process and returns its result.

    If the case runs out of memory, the outcome is "oom".
    """
    torch.manual_seed(0)
    return _measure_step(case) if isinstance(case, StepCase) else _measure_attention(case)


def _measure_step(case: StepCase) -> Result:
    times = StepTimes(case.steps, limit=case.seconds)
    try:
        config = training_configuration(case)
        measure_ours(config, torch.device(case.device), times)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Result("oom", *memory_gib(torch.device(case.device)))
    flops = step_flops(config.model, [case.seq_len])
    return finished(case, statistics.median(times.milliseconds), len(times.milliseconds), flops)


def training_configuration(case: StepCase) -> DictConfig:
    """Composes conf/train.yaml for the case, as train.py does."""
    chosen = [
        f"model.vocab_size={configuration(case).model.vocab_size}",
        f"trainer.precision={case.precision}",
        f"lit_gpt.compile_model={case.compiled}",
        *case.overrides,
    ]
    return training_config(case.model, case.attention, case.seq_len, WARMUP + case.steps, case.device, chosen)


def _measure_attention(case: AttentionCase) -> Result:
    device, forward_ms, forward_peak_gib = torch.device(case.device), None, None
    try:
        forward, both = attention_passes(case)
        forward_ms, _ = timed(forward, case)
        forward_peak_gib, _ = memory_gib(device)
        step_ms, timed_steps = timed(both, case)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Result("oom", *memory_gib(device), forward_ms=forward_ms, forward_peak_gib=forward_peak_gib)
    flops = (1 + 2.5) * 2 * case.n_heads * case.head_dim * case.seq_len**2
    result = finished(case, step_ms, timed_steps, flops)
    return replace(result, forward_ms=forward_ms, forward_peak_gib=forward_peak_gib)


def attention_passes(case: AttentionCase) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns two functions: one runs attention's forward pass without autograd, the other also runs the backward."""
    device = torch.device(case.device)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        attend: Attention = instantiate(compose(overrides=[f"+attention={case.attention}"]).attention)
    require_backend(attend, device)
    schedule = causal_schedule(None, case.seq_len, device)
    shape = (case.seq_len, case.n_heads, case.head_dim)
    q, k, v, do = (torch.randn(shape, dtype=case.operand_dtype, device=device) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v, schedule)

    return forward, lambda: torch.autograd.grad(attend(q, k, v, schedule), (q, k, v), do)


def timed(run: Callable[[], object], case: Case) -> tuple[float, int]:
    """Returns the median milliseconds of the timed runs, and the number of timed runs.

    On a GPU, the allocator's peak memory is reset after the first run, which compiles.
    """
    times = StepTimes(case.steps, limit=case.seconds)
    times.add(_seconds(run, case.device))
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while not times.complete:
        times.add(_seconds(run, case.device))
    return statistics.median(times.milliseconds), len(times.milliseconds)


def _seconds(run: Callable[[], object], device: Device) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def finished(case: Case, step_ms: float, timed_steps: int, flops: float) -> Result:
    """Returns the result of a case that completed in this process."""
    flops_per_s = flops / step_ms * 1e3
    peak = peak_flops(torch.cuda.get_device_name() if case.device == "cuda" else "", case.operand_dtype)
    return Result(
        "ok",
        *memory_gib(torch.device(case.device)),
        step_ms=step_ms,
        tokens_per_s=case.seq_len / step_ms * 1e3,
        tflops=flops_per_s * 1e-12,
        mfu=flops_per_s / peak if peak else None,
        timed_steps=timed_steps,
    )


def capacity(device: Device) -> int:
    """Returns the memory limit of a case in bytes.

    On a GPU, the call creates a CUDA context, which itself uses some memory.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return installed if limit == resource.RLIM_INFINITY else min(installed, limit)
