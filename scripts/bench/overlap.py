"""How much of a step's copies runs at the same time as its kernels, from a trace of torch.profiler."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]  # start and end, in the microseconds of a trace


@dataclass(frozen=True)
class Overlap:
    """One step with copies beside its kernels, in milliseconds."""

    step: float
    to_host: float
    to_device: float
    hidden: float  # of both, beside kernels of the compute stream
    idle: float  # of the compute stream
    waiting: float  # of that, while a copy ran: what offload can be to blame for


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans in order."""
    disjoint: list[Span] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], end)
        else:
            disjoint.append((start, end))
    return disjoint


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The moments that two lists of disjoint, ordered spans share."""
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
    """From what ran on the compute stream and what was copied, in microseconds; outside of `step` nothing counts.

    Both directions may be copied at once: to_host and to_device each count in full, and so does what is hidden of each.
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
    """Of a chrome trace with one range `step`; None without kernels. The busiest stream is the one that computes."""
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
