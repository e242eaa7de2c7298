"""Computes the allocated memory of each component over a training step, from a trace of torch.profiler."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from fa_train.callbacks.monitor import GIB
from scripts.bench.step_trace import LOSS, OPERATORS, OPTIMIZER, Event, Ranges

WEIGHTS, STATE, GRADIENTS = "weights", "optimizer state", "gradients"
KEPT, ATTENTION, TEMPORARY, OTHER = "kept for the backward", "attention", "temporary", "other"
COMPONENTS = {  # in the plot's order from bottom to top, with colours from the palette of Okabe and Ito
    WEIGHTS: "#0072B2",
    STATE: "#56B4E9",
    GRADIENTS: "#009E73",
    KEPT: "#E69F00",
    ATTENTION: "#D55E00",
    LOSS: "#CC79A7",
    TEMPORARY: "#F0E442",
    OTHER: "#999999",
}


def memory_over_time(
    events: Sequence[Event], before: dict[int, tuple[str, int]], gradients: set[int], device: torch.device
) -> tuple[list[float], dict[str, list[int]]]:
    """Returns the microseconds at which the allocated memory changes, and each component's bytes after each change.

    before: {address of memory that was allocated before the step: (its component, its bytes)}. gradients: the addresses
    of the parameters' gradients when the optimizer starts.
    """
    ranges = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    operators = Ranges.of(ranges, OPERATORS)
    forwards = sorted((event["ts"], event["ts"] + event["dur"]) for event in ranges if event["name"] == "step: forward")
    optimizer = max((event["ts"] for event in ranges if event["name"] == "step: optimizer"), default=0.0)
    kind = 1 if device.type == "cuda" else 0  # values of c10::DeviceType
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
    freed: dict[int, float] = {}  # index of an allocation -> time when its memory was freed
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
    """Draws the memory of all components as a stacked plot over the milliseconds since `start`."""
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
    axes.set_xlabel("host time in the step (ms)")
    axes.set_ylabel("allocated (GiB)")
    axes.set_title(title)
    return figure
