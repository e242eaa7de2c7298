"""Formats the results of scripts.bench.context as tables, and plots the speeds relative to the ideal speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from scripts.bench.context_peer import PEER_PARTS

PARTS = ("one", "shared", "forward", "alone", "moved")
BACKWARD = 2.5  # the FLOPs of attention's backward pass, divided by the FLOPs of its forward pass
BARS = {"shared": ("#1f77b4", "with communication"), "alone": ("#c6dbef", "attention alone")}
WIDTH = 0.4  # width of a bar; the distance between two groups of bars is 1


@dataclass(frozen=True)
class Result:
    """The medians of one case over its repetitions.

    ms: the milliseconds of each part of the benchmark. The docstring of scripts/bench/context.py explains the parts.
    ranks_ms: the milliseconds that each rank takes for its share of the attention, without communication.
    received: the largest fraction of the other ranks' keys that any rank receives.
    exposed: the time of `shared` in a repetition, divided by the time of `alone` in the same repetition, minus 1.
    flops: the FLOPs of a forward pass on all ranks together.
    """

    stream: str
    tokens: int
    ms: dict[str, float]
    ranks_ms: list[float]
    received: float
    exposed: float
    flops: float


def table(results: Sequence[Result], ranks: int) -> list[str]:
    """Returns the lines of the results table.

    TFLOP/s are per GPU. In a forward pass, each visible (query, key) pair counts 4 * head_dim FLOPs per query head. The
    milliseconds of the backward pass are `ms["shared"] - ms["forward"]`, because the part `shared` of the benchmark
    times forward and backward together.
    """
    lines = [
        f"| stream | tokens | one GPU, ms | {ranks} GPUs, ms | of ideal | attention alone, of ideal | exposed "
        "| keys moved, ms | keys received | forward, TFLOP/s | backward, TFLOP/s | attention alone of each rank, ms |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|:--|",
    ]
    for result in results:
        one, shared, forward, alone, moved = (result.ms[part] for part in PARTS)
        tera = result.flops / ranks / 1e9
        by_rank = ", ".join(f"{ms:.2f}" for ms in result.ranks_ms)
        lines.append(
            f"| {result.stream} | {result.tokens:,} | {one:.2f} | {shared:.2f} | {one / ranks / shared:.1%} "
            f"| {one / ranks / alone:.1%} | {result.exposed:.1%} | {moved:.2f} | {result.received:.0%} "
            f"| {tera / forward:.0f} | {BACKWARD * tera / (shared - forward):.0f} | {by_rank} |"
        )
    return lines


def peer_table(results: Sequence[Result], ranks: int) -> list[str]:
    """Returns the table lines for torch's context parallelism, or no lines if it was not measured."""
    lines = [
        f"| tokens | torch on one GPU, ms | torch on {ranks} GPUs, ms | of ideal | ours on {ranks} GPUs, ms |",
        "|--:|--:|--:|--:|--:|",
    ]
    measured = [result for result in results if PEER_PARTS[0] in result.ms]
    for result in measured:
        one, shared = (result.ms[part] for part in PEER_PARTS)
        lines.append(
            f"| {result.tokens:,} | {one:.2f} | {shared:.2f} | {one / ranks / shared:.1%} | {result.ms['shared']:.2f} |"
        )
    return ["", *lines] if measured else []


def draw(results: Sequence[Result], ranks: int, title: str) -> Figure:
    """Plots the speeds relative to the ideal speed: one panel per number of tokens, one pair of bars per stream."""
    lengths = list(dict.fromkeys(result.tokens for result in results))
    figure = Figure(figsize=(1 + 4 * len(lengths), 4), layout="constrained")
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for tokens, axes in zip(lengths, panels, strict=True):
        mine = [result for result in results if result.tokens == tokens]
        for i, (part, (color, label)) in enumerate(BARS.items()):
            shares = [result.ms["one"] / ranks / result.ms[part] for result in mine]
            bars = axes.bar([x + (i - 0.5) * WIDTH for x in range(len(mine))], shares, WIDTH, color=color, label=label)
            axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=8)
        axes.axhline(1, color="#999999", linewidth=0.8, zorder=0)
        axes.margins(y=0.12)
        axes.set_xticks(range(len(mine)), [result.stream for result in mine])
        axes.set_title(f"{tokens:,} tokens")
    panels[0].set_ylabel("share of the ideal speed")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure
