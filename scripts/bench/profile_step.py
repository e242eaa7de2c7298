"""One training step under torch.profiler: time by part, a trace for Perfetto, and memory by component.

    python -m scripts.bench.profile_step model=llama_1b seq_len=32768
    python -m scripts.bench.profile_step model=gpt2 memory=offload hydra.run.dir=runs/profile_offload

Overrides are train.py's, and so are the model, the optimizer and the loop: conf/train.yaml is composed as it does.
Only data=synthetic, logger=csv and batch_size=1 (one micro-batch a step) are chosen here where the command does not,
and no checkpoint is written; +commit=HASH is for the head of the table, where the files are a copy without git.
Writes to the run's folder:

- profile.md and profile.csv: the parts of the step, exclusive, so that with idle they sum to its time. What runs beside
  a computing kernel (copies, communication) counts only where it runs alone; `kernels` is its time in full.
- trace.json.gz, for https://ui.perfetto.dev
- memory.png: allocated memory over the step, by component, over the host's time: that is when memory changes hands.

A kernel belongs to the operator that launched it (attention, loss, optimizer), else to the part that its name tells.
On a CPU the same is done with torch's operators, each for the time in which it calls no other.
"""

import csv
import gzip
import json
import os
import re
import shlex
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import train
from fa_train.callbacks.monitor import GIB
from fa_train.lit_gpt import LitGPT
from scripts.bench.provenance import describe
from scripts.bench.step import CONF

DEFAULTS = {"data": "synthetic", "logger": "csv", "batch_size": "1"}
WARMUP = 4  # steps without the profiler: the first two compile and allocate, the others say what profiling costs
TOP = 25  # kernels listed by name

ATTENTION_FORWARD, ATTENTION_BACKWARD = "attention forward", "attention backward"
MATMULS, NORMS, ELEMENTWISE = "matmuls", "norms", "RoPE and other elementwise"
LOSS, OPTIMIZER, COPIES, COMMUNICATION, IDLE = "loss", "optimizer", "copies", "communication", "idle"
PARTS = (
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    MATMULS,
    NORMS,
    ELEMENTWISE,
    LOSS,
    OPTIMIZER,
    COPIES,
    COMMUNICATION,
    IDLE,
)
ASIDE = (COPIES, COMMUNICATION)  # engines of their own: hidden behind whatever computes meanwhile
# kernels of this repository, torch, cuDNN, cuBLAS, NCCL, Liger and inductor, and torch's operators; the first counts
NAMES = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        (COMMUNICATION, r"nccl|^c10d::|gloo:"),
        (COPIES, r"^Memcpy (HtoD|DtoH|PtoP|HtoH)"),
        (
            ATTENTION_BACKWARD,
            r"^_(repair_)?(bwd|dkdv|dq|delta|prepare|finish)_kernel|^flash_attention::backward|flash_bwd|fmha_cutlassB|bprop"
            r"|(scaled_dot_product|flash|efficient|cudnn)_attention.*backward",
        ),
        (
            ATTENTION_FORWARD,
            r"^_(repair_)?(fwd|append|decode|merge)_kernel|^flash_attention::forward|flash_fwd|fmha_cutlassF|fprop"
            r"|scaled_dot_product|_(flash|efficient|cudnn)_attention",
        ),
        (OPTIMIZER, r"adam|multi_tensor|^aten::_foreach"),
        (LOSS, r"cross_entropy|nll_loss|log_?softmax"),
        (
            MATMULS,
            r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|triton_tem|^aten::(addmm|mm|bmm|baddbmm|_int_mm|mv|dot)$",
        ),
        (NORMS, r"norm|rsqrt|GammaBeta"),
    )
)
# what these ranges of the host launch is theirs, whatever its name
OPERATORS = {
    "flash_attention::forward": ATTENTION_FORWARD,
    "flash_attention::backward": ATTENTION_BACKWARD,
    "fa_train::linear_cross_entropy": LOSS,
    "step: optimizer": OPTIMIZER,
}
WEIGHTS, STATE, GRADIENTS = "weights", "optimizer state", "gradients"
KEPT, ATTENTION, TEMPORARY, OTHER = "kept for the backward", "attention", "temporary", "other"
COMPONENTS = {  # from the bottom of the picture; the palette of Okabe and Ito
    WEIGHTS: "#0072B2",
    STATE: "#56B4E9",
    GRADIENTS: "#009E73",
    KEPT: "#E69F00",
    ATTENTION: "#D55E00",
    LOSS: "#CC79A7",
    TEMPORARY: "#F0E442",
    OTHER: "#999999",
}
Event = dict[str, Any]  # of a chrome trace: name, cat, ts and dur in microseconds, tid, args


@dataclass(frozen=True)
class Interval:
    """Something that ran, in microseconds."""

    start: float
    end: float
    part: str
    name: str = ""


@dataclass(frozen=True)
class Ranges:
    """Ranges of host threads that do not nest, by thread, each with what it stands for."""

    by_thread: dict[int, list[Interval]]

    @classmethod
    def of(cls, events: Iterable[Event], names: dict[str, str]) -> "Ranges":
        by_thread: dict[int, list[Interval]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event["ts"]):
            ranges = by_thread[event["tid"]]
            name = event["name"]
            inside_another = ranges and event["ts"] < ranges[-1].end
            if name in names and not inside_another:
                ranges.append(Interval(event["ts"], event["ts"] + event["dur"], names[name], name))
        return cls(dict(by_thread))

    def at(self, thread: int, moment: float) -> Interval | None:
        """The range that the thread was in."""
        ranges = self.by_thread.get(thread, [])
        before = bisect_right(ranges, moment, key=lambda interval: interval.start)
        return ranges[before - 1] if before and moment < ranges[before - 1].end else None


@dataclass(frozen=True)
class Step:
    """One step of a trace: what ran from start to end (microseconds), on the GPU or, without one, on the host."""

    start: float
    end: float
    intervals: list[Interval]
    on_gpu: bool


def part_of(kernel_name: str) -> str:
    """The part of a step that a kernel, or an operator of torch, belongs to by its name."""
    return next((part for part, pattern in NAMES if pattern.search(kernel_name)), ELEMENTWISE)


def idle(intervals: Iterable[Interval], start: float, end: float) -> float:
    """How much of start to end no interval covers."""
    uncovered, reached = 0.0, start
    for interval in sorted(intervals, key=lambda interval: interval.start):
        uncovered += max(0.0, min(interval.start, end) - reached)
        reached = max(reached, min(interval.end, end))
    return uncovered + max(0.0, end - reached)


def exclusive(step: Step) -> dict[str, float]:
    """Microseconds of each part, idle too; they sum to the step's.

    Each moment counts once: on a GPU for what computes, and of several kernels for the one that began first; on the
    host for the innermost operator, the one that began last.
    """

    def rank(interval: Interval) -> tuple[bool, float]:
        return (interval.part not in ASIDE, -interval.start) if step.on_gpu else (True, interval.start)

    parts = dict.fromkeys(PARTS, 0.0)
    clipped = [(max(i.start, step.start), min(i.end, step.end), i) for i in step.intervals]
    clipped = [(start, end, interval) for start, end, interval in clipped if start < end]
    # at one moment, ends come before starts
    changes = sorted(
        [(start, 1, number) for number, (start, _, _) in enumerate(clipped)]
        + [(end, 0, number) for number, (_, end, _) in enumerate(clipped)]
    )
    active: dict[int, Interval] = {}
    reached = step.start
    for moment, starts, number in changes:
        if moment > reached:
            part = max(active.values(), key=rank).part if active else IDLE
            parts[part] += moment - reached
            reached = moment
        if starts:
            active[number] = clipped[number][2]
        else:
            del active[number]
    parts[IDLE] += step.end - reached
    return parts


def hidden(intervals: Sequence[Interval], part: str) -> float:
    """Microseconds in which `part` ran while something else than copies and communication did."""
    computing = [interval for interval in intervals if interval.part not in ASIDE]
    return sum(
        (interval.end - interval.start) - idle(_near(computing, interval), interval.start, interval.end)
        for interval in intervals
        if interval.part == part
    )


def _near(intervals: Sequence[Interval], other: Interval) -> list[Interval]:
    return [interval for interval in intervals if interval.start < other.end and interval.end > other.start]


def step_of(events: Sequence[Event]) -> Step:
    """What a trace with the range `step` has of it."""
    whole = next(event for event in events if event.get("cat") == "user_annotation" and event["name"] == "step")
    start, end = whole["ts"], whole["ts"] + whole["dur"]
    inside = [event for event in events if event.get("ph") == "X" and start <= event["ts"] < end]
    of_host = [event for event in inside if event.get("cat") in ("cpu_op", "user_annotation")]
    owners = Ranges.of(of_host, OPERATORS)
    device = [event for event in inside if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # a kernel knows its launch by a number, and the launch knows the thread that was in an operator
    launches = {
        event["args"]["correlation"]: event
        for event in inside
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    intervals = []
    for event in device or [event for event in of_host if event["cat"] == "cpu_op"]:
        launch = launches.get(event["args"].get("correlation")) if device else event
        owner = owners.at(launch["tid"], launch["ts"]) if launch else None
        part = part_of(event["name"])
        if owner is not None and part not in ASIDE:
            part = owner.part
        intervals.append(Interval(event["ts"], event["ts"] + event["dur"], part, event["name"]))
    return Step(start, end, intervals, bool(device))


def memory_over_time(
    events: Sequence[Event], before: dict[int, tuple[str, int]], gradients: set[int], device: torch.device
) -> tuple[list[float], dict[str, list[int]]]:
    """Moments (microseconds), and the bytes that each component has from then on.

    before: component and bytes of what was allocated when the step began, by address; gradients: where the parameters'
    gradients are when the optimizer begins.
    """
    ranges = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    operators = Ranges.of(ranges, OPERATORS)
    forwards = sorted((event["ts"], event["ts"] + event["dur"]) for event in ranges if event["name"] == "step: forward")
    optimizer = max((event["ts"] for event in ranges if event["name"] == "step: optimizer"), default=0.0)
    kind = 1 if device.type == "cuda" else 0  # of c10::DeviceType
    changes = sorted(
        (
            event
            for event in events
            if event.get("name") == "[memory]"
            and event["args"]["Device Type"] == kind
            and event["args"]["Device Id"] in (device.index or 0, -1)
        ),
        key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)),
    )
    freed: dict[int, float] = {}  # by the number of an allocation, when its address was freed
    last: dict[int, int] = {}
    for number, event in enumerate(changes):
        address = event["args"]["Addr"]
        if event["args"]["Bytes"] > 0:
            last[address] = number
        elif address in last:
            freed[last.pop(address)] = event["ts"]
    held = dict(before)
    sizes = dict.fromkeys(COMPONENTS, 0)
    for component, size in held.values():
        sizes[component] += size
    if changes and kind:
        first = changes[0]["args"]
        sizes[OTHER] += max(0, first["Total Allocated"] - first["Bytes"] - sum(sizes.values()))
    moments: list[float] = []
    over_time: dict[str, list[int]] = {component: [] for component in COMPONENTS}
    for number, event in enumerate(changes):
        address, size, moment = event["args"]["Addr"], event["args"]["Bytes"], event["ts"]
        if size > 0:
            end = freed.get(number, float("inf"))
            if moment < optimizer < end and address in gradients:
                component = GRADIENTS
            elif owner := operators.at(event["tid"], moment):
                component = {LOSS: LOSS, OPTIMIZER: TEMPORARY}.get(owner.part, ATTENTION)
            elif any(start <= moment < stop and end >= stop for start, stop in forwards):
                component = KEPT
            else:
                component = TEMPORARY
            held[address] = component, size
        else:
            component, _ = held.pop(address, (OTHER, 0))
        sizes[component] = max(0, sizes[component] + size)
        moments.append(moment)
        for name, line in over_time.items():
            line.append(sizes[name])
    return moments, over_time


def draw_memory(moments: Sequence[float], over_time: dict[str, list[int]], start: float, title: str) -> Figure:
    """Stacked components over the milliseconds since `start`; each value holds until the next."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    corners = [(moment - start) / 1e3 for moment in moments for _ in range(2)][1:]
    lines = {
        name: [size / GIB for size in sizes for _ in range(2)][:-1] for name, sizes in over_time.items() if any(sizes)
    }
    if corners:
        axes.stackplot(corners, list(lines.values()), labels=list(lines), colors=[COMPONENTS[name] for name in lines])
        total = [sum(sizes) for sizes in zip(*over_time.values(), strict=True)]
        peak = max(total)
        axes.annotate(
            f"peak {peak / GIB:.2f} GiB",
            ((moments[total.index(peak)] - start) / 1e3, peak / GIB),
            xytext=(8, 4),
            textcoords="offset points",
        )
        axes.margins(x=0)
        axes.set_ylim(0, 1.12 * peak / GIB)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.set_xlabel("host's time in the step (ms)")
    axes.set_ylabel("allocated (GiB)")
    axes.set_title(title)
    return figure


class StepProfiler(Callback):
    """Times WARMUP steps, then profiles one; `folder` gets the trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.milliseconds: list[float] = []  # of the steps without the profiler
        self.trace = folder / "trace.json.gz"
        self.before: dict[int, tuple[str, int]] = {}
        self.gradients: set[int] = set()
        self.peak = self.reserved = 0
        self._profiler: profile | None = None
        self._recording = False
        self._step: record_function | None = None
        self._phase: record_function | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._start_step(trainer, pl_module)
        self._enter("forward")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._leave()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.gradients = {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}
        self._enter("optimizer")  # clipping too

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        _wait(pl_module.device)
        if self._recording:
            self._stop(pl_module)
        elif self._profiler is None:
            self.milliseconds.append((time.perf_counter() - self._start) * 1e3)

    def _start_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _wait(pl_module.device)
        if trainer.global_step == WARMUP:  # a step for the profiler to start up in
            self._profiler = _profiler(pl_module.device)
            self._profiler.start()
        elif self._profiler is not None and trainer.global_step == WARMUP + 1:
            self.before = _addresses(pl_module, trainer.optimizers)
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(pl_module.device)
            self._profiler.step()
            self._recording = True
            self._step = record_function("step")
            self._step.__enter__()
        self._start = time.perf_counter()

    def _stop(self, pl_module: L.LightningModule) -> None:
        assert self._step is not None and self._profiler is not None
        self._step.__exit__(None, None, None)
        self._recording = False
        self._profiler.stop()
        if pl_module.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(pl_module.device)
            self.reserved = torch.cuda.max_memory_reserved(pl_module.device)
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.trace))

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._recording:
            self._phase = record_function(f"step: {phase}")
            self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), profile_memory=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _addresses(module: L.LightningModule, optimizers: list[torch.optim.Optimizer]) -> dict[int, tuple[str, int]]:
    """Component and bytes of what lasts from step to step and of the last step's gradients, by address."""
    parameters = list(module.parameters())
    moments = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device == module.device
    ]
    # a CPU's allocator does not report that memory of before the profiler is freed, and these are in every step
    known = module.device.type == "cuda"
    gradients = [p.grad for p in parameters if p.grad is not None and known]
    return {
        tensor.untyped_storage().data_ptr(): (component, tensor.untyped_storage().nbytes())
        for component, tensors in ((WEIGHTS, parameters), (STATE, moments), (GRADIENTS, gradients))
        for tensor in tensors
    }


def table(step: Step) -> list[tuple[str, float, float, float, int]]:
    """A row a part: its exclusive milliseconds and share of the step, its kernels' milliseconds, their number."""
    parts, whole = exclusive(step), step.end - step.start
    kernels, numbers = Counter[str](), Counter[str]()
    for interval in step.intervals:
        kernels[interval.part] += interval.end - interval.start  # type: ignore[assignment]
        numbers[interval.part] += 1
    return [(part, us / 1e3, us / whole, kernels[part] / 1e3, numbers[part]) for part, us in parts.items()]


def report(step: Step, head: dict[str, str]) -> str:
    """profile.md."""
    lines = ["# Where a training step's time goes", "", *(f"- {key}: `{value}`" for key, value in head.items()), ""]
    kind = "kernels" if step.on_gpu else "operators"
    if step.on_gpu:
        copies = sum(i.end - i.start for i in step.intervals if i.part == COPIES)
        if copies:
            share = hidden(step.intervals, COPIES) / copies
            lines += [f"{share:.1%} of the copies' {copies / 1e3:.1f} ms ran beside computing kernels.", ""]
    # an operator's own time includes those that it calls, so only kernels' add up
    lines += [f"| part | ms | share | {kind} | {'kernels ms' if step.on_gpu else ''} |", "|:--|--:|--:|--:|--:|"]
    rows = table(step)
    for part, ms, share, kernels_ms, number in rows:
        lines.append(f"| {part} | {ms:.2f} | {share:.1%} | {number} | {f'{kernels_ms:.2f}' if step.on_gpu else ''} |")
    lines += [f"| step | {sum(row[1] for row in rows):.2f} | 100.0% | {len(step.intervals)} | |", ""]
    if step.on_gpu:
        lines += ["| kernel | part | launches | ms | share |", "|:--|:--|--:|--:|--:|"]
        times, numbers = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for interval in step.intervals:
            times[interval.name, interval.part] += interval.end - interval.start  # type: ignore[assignment]
            numbers[interval.name, interval.part] += 1
        whole = step.end - step.start
        for key, us in times.most_common(TOP):
            name = key[0].replace("|", "/")[:120]
            lines.append(f"| `{name}` | {key[1]} | {numbers[key]} | {us / 1e3:.2f} | {us / whole:.1%} |")
    return "\n".join(lines) + "\n"


def profile_step(cfg: DictConfig, folder: Path) -> None:
    """Trains for as many steps as are needed, and writes what this script writes to `folder`."""
    cfg.max_steps = WARMUP + 2
    cfg.callbacks.checkpoint = None  # of a run that is thrown away
    trainer, lit_gpt, data = train.build(cfg)
    assert isinstance(lit_gpt, LitGPT)
    profiler = StepProfiler(folder)
    # before the callbacks that wait for the device
    trainer.callbacks.insert(0, profiler)  # type: ignore[attr-defined]
    trainer.fit(lit_gpt, datamodule=data)
    if not trainer.is_global_zero:
        return
    device = trainer.strategy.root_device
    with gzip.open(profiler.trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    step = step_of(events)
    tokens = cfg.seq_len * cfg.batch_size
    seconds = statistics.median(profiler.milliseconds[2:]) / 1e3
    command = shlex.join(["python", "-m", "scripts.bench.profile_step", *sys.argv[1:]])
    head = describe(command, cfg.get("commit"), date.today())
    head["step"] = (
        f"{tokens} tokens in {trainer.accumulate_grad_batches} micro-batches; {(step.end - step.start) / 1e3:.1f} ms "
        f"profiled, {seconds * 1e3:.1f} ms without the profiler ({tokens / seconds:.0f} tokens/s)"
    )
    if profiler.peak:
        head["memory"] = f"peak {profiler.peak / GIB:.2f} GiB, reserved {profiler.reserved / GIB:.2f} GiB"
    text = report(step, head)
    print(text)
    (folder / "profile.md").write_text(text, encoding="utf-8")
    with (folder / "profile.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("part", "ms", "share", "kernels_ms", "kernels"))
        writer.writerows(table(step))
    inside = [event for event in events if step.start <= event.get("ts", -1) < step.end]
    moments, over_time = memory_over_time(inside, profiler.before, profiler.gradients, device)
    title = f"{HydraConfig.get().runtime.choices['model']}, {tokens} tokens, {head['GPU']}"
    draw_memory(moments, over_time, step.start, title).savefig(folder / "memory.png", dpi=150)
    print(f"results: {folder}")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> None:
    with train.errors_in_one_line():
        profile_step(cfg, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
    given = {argument.split("=")[0] for argument in sys.argv[1:]}
    sys.argv += [f"{name}={value}" for name, value in DEFAULTS.items() if name not in given]
    with train.errors_in_one_line():
        main()
