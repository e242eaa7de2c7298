"""Finds the parts of a training step in a trace of torch.profiler, and computes the time of each part."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
ASIDE = (COPIES, COMMUNICATION)  # copies and communication get only the time in which no computing kernel runs
# Patterns for the names of kernels (ours, torch, cuDNN, cuBLAS, NCCL, Liger, inductor) and of torch's operators. First
# match wins.
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
            r"^_(repair_)?(fwd|append|decode|merge|schedule)_kernel|^flash_attention::forward|flash_fwd|fmha_cutlassF|fprop"
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
# Maps host ranges to parts of a step. A kernel belongs to the part of the host range that launches the kernel. Kernels
# and copies whose names match the patterns of COPIES and COMMUNICATION in `NAMES` always belong to these two parts.
OPERATORS = {
    "flash_attention::forward": ATTENTION_FORWARD,
    "flash_attention::backward": ATTENTION_BACKWARD,
    "fa_train::linear_cross_entropy": LOSS,
    "step: optimizer": OPTIMIZER,
}
Event = dict[str, Any]  # a Chrome trace event: name, cat, ts and dur in microseconds, tid, args


@dataclass(frozen=True)
class Interval:
    """The time span of a kernel, copy or operator, in microseconds."""

    start: float
    end: float
    part: str
    name: str = ""


@dataclass(frozen=True)
class Ranges:
    """The time spans of the outermost ranges in each host thread."""

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
        ranges = self.by_thread.get(thread, [])
        before = bisect_right(ranges, moment, key=lambda interval: interval.start)
        return ranges[before - 1] if before and moment < ranges[before - 1].end else None


@dataclass(frozen=True)
class Step:
    """One step, in microseconds. `intervals` come from the GPU, or from the host if there is no GPU."""

    start: float
    end: float
    intervals: list[Interval]
    on_gpu: bool


def part_of(kernel_name: str) -> str:
    """Returns the part of a step to which a kernel or an operator of torch belongs, according to its name."""
    return next((part for part, pattern in NAMES if pattern.search(kernel_name)), ELEMENTWISE)


def idle(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Returns the total time between start and end that lies outside all intervals."""
    uncovered, reached = 0.0, start
    for interval in sorted(intervals, key=lambda interval: interval.start):
        uncovered += max(0.0, min(interval.start, end) - reached)
        reached = max(reached, min(interval.end, end))
    return uncovered + max(0.0, end - reached)


def exclusive(step: Step) -> dict[str, float]:
    """Returns the microseconds of each part of the step, including idle time. The parts add up to the step's time.

    Each point in time counts for exactly one part of the step. If a computing kernel runs on a GPU at the same time as
    a copy or a communication kernel, the time counts for the computing kernel's part of the step. If several computing
    kernels run at the same time, the time counts for the part of the kernel that started first. Without a GPU, time
    counts for the part of the innermost operator that is running.
    """

    def rank(interval: Interval) -> tuple[bool, float]:
        return (interval.part not in ASIDE, -interval.start) if step.on_gpu else (True, interval.start)

    parts = dict.fromkeys(PARTS, 0.0)
    clipped = [(max(i.start, step.start), min(i.end, step.end), i) for i in step.intervals]
    clipped = [(start, end, interval) for start, end, interval in clipped if start < end]
    # if one interval ends when another interval starts, the end comes first
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
    """Returns the microseconds in which `part` (copies or communication) overlapped with computing kernels."""
    computing = [interval for interval in intervals if interval.part not in ASIDE]
    return sum(
        (interval.end - interval.start) - idle(_near(computing, interval), interval.start, interval.end)
        for interval in intervals
        if interval.part == part
    )


def _near(intervals: Sequence[Interval], other: Interval) -> list[Interval]:
    return [interval for interval in intervals if interval.start < other.end and interval.end > other.start]


def step_of(events: Sequence[Event]) -> Step:
    """Extracts the step from a trace that has one range named `step`."""
    whole = next(event for event in events if event.get("cat") == "user_annotation" and event["name"] == "step")
    start, end = whole["ts"], whole["ts"] + whole["dur"]
    inside = [event for event in events if event.get("ph") == "X" and start <= event["ts"] < end]
    of_host = [event for event in inside if event.get("cat") in ("cpu_op", "user_annotation")]
    owners = Ranges.of(of_host, OPERATORS)
    device = [event for event in inside if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # A kernel and its launch have the same correlation id.
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
