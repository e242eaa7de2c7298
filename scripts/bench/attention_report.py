"""Writes the report of scripts/bench/attention.py: a table for each section and pass, and plots of time and TFLOP/s."""

from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from scripts.bench.page import header

MODEL_DIM = 2048  # default upper limit of n_heads * head_dim
LARGE_GIB = 4.0

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
STYLES = {  # the palette of Okabe and Ito, and a grey; each line also has its own marker
    "naive": ("#000000", "o"),
    "sdpa-flash2": ("#E69F00", "s"),
    "sdpa-cudnn": ("#56B4E9", "^"),
    "flex": ("#009E73", "D"),
    "fa3": ("#CC79A7", "v"),
    "fa4": ("#8C8C8C", "<"),
    "ours": ("#D55E00", "P"),
    "ours-packed": ("#0072B2", "X"),
}


@dataclass(frozen=True)
class Row:
    """One result. ms, tflops and peak_gib (peak memory) are None unless the outcome is "ok"."""

    section: str
    workload: str
    head_dim: int
    group: int
    batch: int
    seqlen: int
    causal: bool
    backend: str
    direction: Direction
    outcome: str  # "ok", "oom" or the first line of the error
    ms: float | None
    tflops: float | None
    peak_gib: float | None


def markdown(rows: list[Row], head: dict[str, str], model_dim: int = MODEL_DIM) -> str:
    """Formats the page: a table for each section and pass, with a line per workload and a column per backend."""
    lines = [
        *header("Attention: time, TFLOP/s and peak memory", head),
        f"bf16, n_heads × head_dim = {model_dim}, or slightly less. Backends run in random order, except those of more "
        f"than {LARGE_GIB:g} GiB. Each is replayed as a CUDA graph. A cell is TFLOP/s · median milliseconds · peak "
        "GiB. The forward counts 4 · n_heads · head_dim · Σ length² FLOPs, and half of that if it is causal. The "
        "backward counts 2.5 times as many. The peak does not include q, k, v and do. For the backward, it is the "
        "peak of forward and backward together. `ours` builds its schedule in every call. `ours-packed` gets a "
        "schedule, like a layer of a model. `flex` gets a block mask.",
    ]
    for section, causal, direction in dict.fromkeys((row.section, row.causal, row.direction) for row in rows):
        chosen = [row for row in rows if (row.section, row.causal, row.direction) == (section, causal, direction)]
        backends = list(dict.fromkeys(row.backend for row in chosen))
        cells = {(row.head_dim, row.group, row.workload, row.backend): cell(row) for row in chosen}
        lines += ["", f"## {section.capitalize()}, {'causal' if causal else 'not causal'}, {direction}", ""]
        lines.append(f"| d | workload | {' | '.join(backends)} |")
        lines.append("|--:|:--|" + "--:|" * len(backends))
        for head_dim, group, workload in dict.fromkeys((row.head_dim, row.group, row.workload) for row in chosen):
            results = [cells.get((head_dim, group, workload, backend), "–") for backend in backends]
            heads = f", {group} query heads per KV head" if group > 1 else ""
            lines.append(f"| {head_dim} | {workload}{heads} | {' | '.join(results)} |")
    failures = [row for row in rows if row.outcome not in ("ok", "oom")]
    if failures:
        lines += ["", "## Failures", ""]
        lines += [
            f"- {row.backend}, d={row.head_dim}, {row.workload}, {row.direction}: {row.outcome}" for row in failures
        ]
    return "\n".join(lines) + "\n"


def cell(row: Row) -> str:
    """Formats the TFLOP/s, time and peak memory of one result."""
    if row.ms is None:
        return "OOM" if row.outcome == "oom" else "failed"
    return f"{row.tflops:.0f} · {row.ms:.3g} ms · {row.peak_gib:.3g}"


def draw(rows: list[Row], title: str) -> Figure:
    """Plots the times and the peak memory of dense workloads against length, in one column per head_dim."""
    dense = [row for row in rows if row.section == "dense" and row.group == 1]
    head_dims = sorted({row.head_dim for row in dense})
    panels: list[tuple[Direction, str, str]] = [
        ("forward", "ms", "forward time (ms)"),
        ("backward", "ms", "backward time (ms)"),
        ("backward", "peak_gib", "peak memory, both passes (GiB)"),
    ]
    figure = Figure(figsize=(1 + 5 * len(head_dims), 11), layout="constrained")
    grid = figure.subplots(len(panels), len(head_dims), sharex=True, sharey="row", squeeze=False)
    for (direction, quantity, label), line_of_axes in zip(panels, grid, strict=True):
        for head_dim, axes in zip(head_dims, line_of_axes, strict=True):
            _draw_panel(axes, [r for r in dense if (r.direction, r.head_dim) == (direction, head_dim)], quantity)
        line_of_axes[0].set_ylabel(label)
    for head_dim, top, bottom in zip(head_dims, grid[0], grid[-1], strict=True):
        top.set_title(f"head_dim {head_dim}")
        bottom.set_xlabel("sequence length")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure


def _draw_panel(axes: Axes, rows: list[Row], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    for backend in dict.fromkeys(row.backend for row in rows):
        color, marker = STYLES[backend]
        mine = [row for row in rows if row.backend == backend]
        done = [row for row in mine if row.ms is not None]
        values = [getattr(row, quantity) for row in done]
        axes.plot([row.seqlen for row in done], values, color=color, marker=marker, label=backend)
        for row in mine:
            if row.outcome == "oom":
                above = axes.get_xaxis_transform()  # x coordinates in tokens, y as a fraction of the plot's height
                axes.plot([row.seqlen], [0.9], color=color, marker=marker, fillstyle="none", transform=above)
                axes.text(row.seqlen, 0.93, "OOM", color=color, ha="center", va="bottom", transform=above)
    seqlens = sorted({row.seqlen for row in rows})
    axes.set_xticks(seqlens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in seqlens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_rates(rows: list[Row], title: str) -> Figure:
    """Plots TFLOP/s as bars: one column per head_dim, one row per pass, one group of bars per workload."""
    shown = [row for row in rows if row.group == 1 and row.tflops is not None]
    head_dims = sorted({row.head_dim for row in shown})
    backends = [name for name in STYLES if any(row.backend == name for row in shown)]
    figure = Figure(figsize=(1 + 6 * len(head_dims), 8), layout="constrained")
    grid = figure.subplots(len(DIRECTIONS), len(head_dims), sharex="col", sharey=True, squeeze=False)
    for direction, line_of_axes in zip(DIRECTIONS, grid, strict=True):
        for head_dim, axes in zip(head_dims, line_of_axes, strict=True):
            workloads = list(dict.fromkeys(row.workload for row in shown if row.head_dim == head_dim))
            mine = [row for row in shown if (row.direction, row.head_dim) == (direction, head_dim)]
            _draw_bars(axes, mine, workloads, backends)
        line_of_axes[0].set_ylabel(f"{direction}, TFLOP/s")
    for head_dim, axes in zip(head_dims, grid[0], strict=True):
        axes.set_title(f"head_dim {head_dim}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure


def _draw_bars(axes: Axes, rows: list[Row], workloads: list[str], backends: list[str]) -> None:
    width = 0.85 / len(backends)
    for i, backend in enumerate(backends):
        mine = [row for row in rows if row.backend == backend]
        places = [workloads.index(row.workload) + (i - (len(backends) - 1) / 2) * width for row in mine]
        bars = axes.bar(places, [row.tflops or 0.0 for row in mine], width, color=STYLES[backend][0], label=backend)
        axes.bar_label(bars, fmt="%.0f", rotation=90, padding=2, fontsize=6)
    axes.set_xticks(range(len(workloads)), workloads, fontsize=8, rotation=20, ha="right", rotation_mode="anchor")
    axes.margins(y=0.1)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
