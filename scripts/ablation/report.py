"""Writes the results of an ablation as CSV files, a page with tables, a picture, and a summary run of W&B."""

import csv
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fa_train.callbacks.monitor import GIB
from scripts.ablation.results import Job, Result, Settings
from scripts.bench.page import header

STYLES = {  # the palette of Okabe and Ito; each line also has its own marker, for readers who cannot tell colours apart
    "naive": ("#000000", "o"),
    "chunked": ("#009E73", "D"),
    "sdpa": ("#E69F00", "s"),
    "flash": ("#D55E00", "P"),
}
MEASURED = ("outcome", "peak_gib", "reserved_gib", "step_ms", "tokens_per_s", "tflops", "mfu", "timed_steps")
PANELS = {"peak_gib": "peak memory (GiB)", "tokens_per_s": "tokens/s", "mfu": "MFU"}  # {quantity: label}
TOKENS = "sequence length (tokens)"
Cell = str | int | float | None
Row = tuple[Job, Result]


@dataclass(frozen=True)
class Table:
    """A table with a title. `name` is the name of the table's CSV file and of its W&B entry."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]

    def write_csv(self, folder: Path) -> None:
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)

    def markdown(self) -> str:
        rows = [[*self.columns], ["---"] * len(self.columns), *([shown(value) for value in row] for row in self.rows)]
        lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        return "\n".join([f"## {self.title}", "", *lines, ""])


@dataclass(frozen=True)
class Chart:
    """Lines that W&B draws. Each line has a list of x values, a list of y values, and a key in the legend."""

    xs: list[list[int]]
    ys: list[list[float]]
    keys: list[str]


def in_order(results: Mapping[Job, Result]) -> list[Row]:
    """Sorts results by attention, in the order of `STYLES`, and by length."""
    order = list(STYLES)

    def place(row: Row) -> tuple[int, Job]:
        attention = row[0].attention
        return order.index(attention) if attention in order else len(order), row[0]

    return sorted(results.items(), key=place)


def tables(rows: list[Row], settings: Settings) -> list[Table]:
    return [results_table(rows), formula_table(rows, settings)]


def results_table(rows: list[Row]) -> Table:
    cells: list[list[Cell]] = [
        [*job, *(getattr(result, name) for name in MEASURED), int(result.oom)] for job, result in rows
    ]
    return Table("ablation", "Training steps", (*Job._fields, *MEASURED, "oom"), cells)


def formula_table(rows: list[Row], settings: Settings) -> Table:
    """Makes a table that compares the minimum memory of naive attention with its measured memory at each length."""
    formula, found = settings.formula, dict(rows)
    cells: list[list[Cell]] = []
    for n in lengths_of(rows):
        naive = found.get(Job("naive", n))
        measured = naive.peak_gib if naive is not None and has(naive, "peak_gib") else None
        expected = "must fail" if formula.peak(n) > settings.device_bytes else "may fit"
        cells.append([n, n / formula.head_dim, formula.scores(n) / GIB, formula.peak(n) / GIB, measured, expected])
    columns = ("seq_len", "n_over_d", "scores_4n2_gib", "peak_gib_predicted_least", "peak_gib_measured", "expected")
    return Table("ablation_formula", "Naive attention: formula and measurement", columns, cells)


def shown(value: Cell) -> str:
    """Formats one cell of the tables in ablation.md."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def markdown(rows: list[Row], settings: Settings, head: Mapping[str, str]) -> str:
    blocks = ["\n".join(header("Attention: memory and speed", head))]
    blocks += ["![memory, tokens/s and MFU against sequence length](ablation.png)\n", f"{settings.explanation}\n"]
    return "\n".join([*blocks, *(table.markdown() for table in tables(rows, settings))])


def write_files(rows: list[Row], settings: Settings, head: Mapping[str, str], folder: Path) -> None:
    """Writes ablation.md, ablation.png, and a CSV file for each table."""
    for table in tables(rows, settings):
        table.write_csv(folder)
    draw(rows, settings, f"{settings.title}, {head['GPU']}").savefig(folder / "ablation.png")
    (folder / "ablation.md").write_text(markdown(rows, settings, head), encoding="utf-8")


def draw(rows: list[Row], settings: Settings, title: str) -> Figure:
    """Plots memory, tokens/s and MFU against sequence length on logarithmic axes."""
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(PANELS)))
    for panel, (quantity, label) in zip(panels, PANELS.items(), strict=True):
        _draw_panel(panel, rows, quantity)
        panel.set_ylabel(label)
        panel.set_xlabel(TOKENS)
    _draw_formula(panels[0], rows, settings)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.suptitle(title)
    return figure


def _draw_formula(axes: Axes, rows: list[Row], settings: Settings) -> None:
    formula, device_bytes = settings.formula, settings.device_bytes
    # leave out values above four times the device's memory, which would flatten the other lines
    lengths = [n for n in lengths_of(rows) if formula.peak(n) < 4 * device_bytes]
    axes.plot(lengths, [formula.peak(n) / GIB for n in lengths], "k:", label="naive, predicted least")
    axes.axhline(device_bytes / GIB, color="#888888", linestyle="--", label="the device's memory")
    fails_at = formula.fails_at(device_bytes)
    if fails_at <= max(lengths_of(rows)):
        axes.axvline(fails_at, color="#888888", linestyle=":", label="naive must fail from here")


def _draw_panel(axes: Axes, rows: list[Row], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    above = axes.get_xaxis_transform()  # x coordinates in tokens, y as a fraction of the plot's height
    for attention in dict.fromkeys(job.attention for job, _ in rows):
        color, marker = STYLES.get(attention, ("#0072B2", "X"))
        mine = [(job.seq_len, result) for job, result in rows if job.attention == attention]
        done = [(n, getattr(result, quantity)) for n, result in mine if has(result, quantity)]
        axes.plot([n for n, _ in done], [y for _, y in done], color=color, marker=marker, label=attention)
        for n in (n for n, result in mine if result.oom):
            axes.plot([n], [0.9], color=color, marker=marker, fillstyle="none", transform=above)
            axes.text(n, 0.93, "OOM", color=color, ha="center", va="bottom", transform=above)
    if not any(has(result, quantity) for _, result in rows):
        is_done = any(result.outcome == "ok" for _, result in rows)
        text = "unknown on this device" if is_done else "no job was measured"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    lengths = lengths_of(rows)
    axes.set_xticks(lengths, [length_label(n) for n in lengths])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)  # the x axis also covers lengths without a point
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#dddddd", linewidth=0.6)


def length_label(n: int) -> str:
    """Formats a number of tokens, for example 1024 as 1k and 1048576 as 1M."""
    return f"{n >> 20}M" if n % 2**20 == 0 else f"{n >> 10}k" if n % 2**10 == 0 else str(n)


def lengths_of(rows: list[Row]) -> list[int]:
    return sorted({job.seq_len for job, _ in rows})


def has(result: Result, quantity: str) -> bool:
    """Returns whether the result holds a measured value of this quantity.

    If a job ran out of memory, its peak_gib does not count as a measured value.
    """
    return result.outcome == "ok" and getattr(result, quantity) is not None


def chart(rows: list[Row], quantity: str, device_bytes: int) -> Chart:
    """Returns a chart in which each attention has a line of results, and a line of the jobs that ran out of memory."""
    oom_at = device_bytes / GIB if quantity == "peak_gib" else 0.0
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    for attention, group in groupby(rows, key=lambda row: row[0].attention):
        mine = [(job.seq_len, result) for job, result in group]
        lines.append((attention, [(n, getattr(result, quantity)) for n, result in mine if has(result, quantity)]))
        lines.append((f"{attention} OOM", [(n, oom_at) for n, result in mine if result.oom]))
    lines = [(name, points) for name, points in lines if points]
    xs, ys = [[n for n, _ in points] for _, points in lines], [[y for _, y in points] for _, points in lines]
    return Chart(xs, ys, [name for name, _ in lines])


def log_summary(
    rows: list[Row], settings: Settings, head: Mapping[str, str], folder: Path, **settings_of_run: Any
) -> None:
    """Logs all tables, charts and the picture that write_files has written to a summary run of W&B.

    settings_of_run: arguments of wandb.init, such as mode, project and group.
    """
    import wandb

    run = wandb.init(
        id=secrets.token_hex(4),  # without an id, the summary would continue the run that WANDB_RUN_ID names
        name="summary", job_type="summary", tags=["summary"], config=dict(head), dir=folder,
        settings=wandb.Settings(init_timeout=60, silent=True), **settings_of_run,
    )  # fmt: skip
    logged: dict[str, Any] = {"picture/ablation": wandb.Image(str(folder / "ablation.png"))}
    for table in tables(rows, settings):
        logged[f"table/{table.name}"] = wandb.Table(columns=[*table.columns], data=table.rows)
    for quantity, label in PANELS.items():
        lines = chart(rows, quantity, settings.device_bytes)
        if lines.keys:
            logged[f"chart/{quantity}"] = wandb.plot.line_series(lines.xs, lines.ys, lines.keys, label, TOKENS)
    run.log(logged)
    run.finish()
