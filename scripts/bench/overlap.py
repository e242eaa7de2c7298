"""Computes how long the copies of a training step overlap with its kernels, from a trace of torch.profiler."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]  # start and end in microseconds, as in the trace


@dataclass(frozen=True)
class Overlap:
    """The times of one step and of its copies between host and GPU, in milliseconds."""

    step: float
    to_host: float
    to_device: float
    hidden: float  # time of copies to the host or the device while the compute stream runs a kernel
    idle: float  # time in which the compute stream runs no kernel
    waiting: float  # idle time of the compute stream during a copy, possibly caused by offload


def merged(spans: Iterable[Span]) -> list[Span]:
    """Returns disjoint, sorted spans that cover the same times as `spans`."""
    disjoint: list[Span] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], end)
        else:
            disjoint.append((start, end))
    return disjoint


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Returns the intersection of two lists of disjoint, sorted spans."""
    shared: list[Span] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            shared.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def overlap(step: Span, compute: Iterable[Span], to_host: Iterable[Span], to_device: Iterable[Span]) -> Overlap:
    """Computes the times of one step from the spans of the step, its kernels and its copies.

    If kernels hide copies in both directions at the same time, `hidden` counts this time twice.
    """
    computing, out, back = (common(merged(spans), [step]) for spans in (compute, to_host, to_device))
    edges = [step[0], *(moment for span in computing for moment in span), step[1]]
    standing = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return Overlap(
        step=length([step]) / 1e3,
        to_host=length(out) / 1e3,
        to_device=length(back) / 1e3,
        hidden=(length(common(out, computing)) + length(common(back, computing))) / 1e3,
        idle=length(standing) / 1e3,
        waiting=length(common(standing, merged([*out, *back]))) / 1e3,
    )


def overlap_of(events: Sequence[dict[str, Any]]) -> Overlap | None:
    """Computes the times of a step from a Chrome trace that has one range named `step`.

    Returns None without kernels. The stream with the longest total kernel time is taken as the compute stream.
    """
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == "step"]
    streams: dict[int, list[Span]] = defaultdict(list)
    copies: dict[str, list[Span]] = {"DtoH": [], "HtoD": []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            span = event["ts"], event["ts"] + event["dur"]
            direction = next((name for name in copies if f"Memcpy {name}" in event["name"]), None)
            (copies[direction] if direction else streams[event["args"]["stream"]]).append(span)
    if not streams:
        return None
    step = ranges[-1]["ts"], ranges[-1]["ts"] + ranges[-1]["dur"]
    return overlap(step, max(streams.values(), key=length), copies["DtoH"], copies["HtoD"])
