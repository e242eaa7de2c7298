"""Writes the results of an ablation as CSV files, tables, pictures, a page with all of them, and W&B runs."""

import base64
import csv
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fa_train.callbacks.monitor import GIB
from scripts.ablation.cases import AttentionCase, Case, Result, StepCase
from scripts.ablation.formula import Formula, attention_formula, step_formula
from scripts.bench.page import header

STYLES = {  # the palette of Okabe and Ito; each line also has its own marker, for readers who cannot tell colours apart
    "naive": ("#000000", "o"),
    "chunked": ("#009E73", "D"),
    "sdpa": ("#E69F00", "s"),
    "flash": ("#D55E00", "P"),
}
MEASURED = ("outcome", "peak_gib", "reserved_gib", "step_ms", "tokens_per_s", "tflops", "mfu", "timed_steps")
FORWARD = ("forward_peak_gib", "forward_ms")
LABELS = {
    "peak_gib": "peak memory (GiB)",
    "step_ms": "time (ms)",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "forward_peak_gib": "peak memory (GiB), forward",
    "forward_ms": "time (ms), forward",
}
STEP_PANELS = ("peak_gib", "tokens_per_s", "mfu")
ATTENTION_PANELS = ("forward_peak_gib", "peak_gib", "forward_ms", "step_ms")
Cell = str | int | float | None
AnyCase = TypeVar("AnyCase", bound=Case)
Row = tuple[AnyCase, Result]


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

    def html(self) -> str:
        names = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(shown(x))}</td>' for x in row)}</tr>\n" for row in self.rows)
        head, body = f"<thead><tr>{names}</tr></thead>", f"<tbody>\n{rows}</tbody>"
        return f"<h2>{escape(self.title)}</h2>\n<table>{head}\n{body}</table>\n"


@dataclass(frozen=True)
class Part:
    """The report of one sweep, which measures either whole training steps or only attention."""

    name: str
    explanations: list[str]
    tables: list[Table]
    picture: Figure
    charts: dict[str, "Chart"]


@dataclass(frozen=True)
class Chart:
    label: str
    xs: list[list[int]]
    ys: list[list[float]]
    keys: list[str]


def step_part(rows: list[Row[StepCase]], device_bytes: int, gpu: str) -> Part:
    """Makes the report of the training steps. All `rows` must belong to one model."""
    case, _ = rows[0]
    formula = step_formula(case)
    names = [case.attention for case, _ in rows]
    what = ", ".join([case.model, case.precision, *case.overrides])
    return Part(
        "ablation",
        [formula.explain(f"a training step of {what}", device_bytes)],
        [
            results_table("ablation", "Training steps", rows, MEASURED),
            formula_table("ablation_formula", rows, lambda case: [("peak_gib", formula)], device_bytes),
        ],
        draw_steps(rows, formula, device_bytes, f"{what}, {gpu}"),
        {name: chart(names, rows, name, device_bytes) for name in STEP_PANELS},
    )


def attention_part(rows: list[Row[AttentionCase]], device_bytes: int, gpu: str) -> Part:
    names = [f"{case.attention}, {case.shape}" for case, _ in rows]
    cases = {case.shape: case for case, _ in rows}
    return Part(
        "attention",
        [attention_formula(c, "both").explain(f"alone, {shape}", device_bytes) for shape, c in cases.items()],
        [
            results_table("attention", "Attention alone", rows, (*MEASURED, *FORWARD)),
            formula_table("attention_formula", rows, attention_formulas, device_bytes),
        ],
        draw_attention(rows, device_bytes, f"causal attention alone, {gpu}"),
        {f"attention_{name}": chart(names, rows, name, device_bytes) for name in ATTENTION_PANELS},
    )


def attention_formulas(case: AttentionCase) -> list[tuple[str, Formula]]:
    """Returns pairs: the name of a measured memory peak, and the formula for its minimum."""
    return [("forward_peak_gib", attention_formula(case, "forward")), ("peak_gib", attention_formula(case, "both"))]


def results_table(name: str, title: str, rows: list[Row[AnyCase]], measured: tuple[str, ...]) -> Table:
    columns = rows[0][0].COLUMNS
    cells: list[list[Cell]] = [
        [*(getattr(case, column) for column in columns), *(getattr(result, x) for x in measured), int(result.oom)]
        for case, result in rows
    ]
    return Table(name, title, (*columns, *measured, "oom"), cells)


def formula_table(
    name: str,
    rows: list[Row[AnyCase]],
    formulas: Callable[[AnyCase], list[tuple[str, Formula]]],
    device_bytes: int,
) -> Table:
    """Makes a table that compares the minimum memory of naive attention with its measured memory at each length."""
    shape = tuple(column for column in rows[0][0].COLUMNS if column not in ("attention", "seq_len"))
    cells: dict[tuple[Cell, ...], list[Cell]] = {}
    for case, result in rows:
        key = (*(getattr(case, column) for column in shape), case.seq_len)
        naive = case.attention == "naive"
        if key in cells and not naive:
            continue
        quantities = formulas(case)
        _, largest = quantities[-1]
        numbers: list[Cell] = [largest.traffic_ratio(case.seq_len), largest.scores(case.seq_len) / GIB]
        for quantity, formula in quantities:
            measured = getattr(result, quantity) if naive and has(result, quantity) else None
            numbers += [formula.peak(case.seq_len) / GIB, measured]
        fails = largest.peak(case.seq_len) > device_bytes
        cells[key] = [*key, *numbers, "must fail" if fails else "may fit"]
    compared = [f"{x}_{kind}" for x, _ in formulas(rows[0][0]) for kind in ("predicted_least", "measured")]
    columns = (*shape, "seq_len", "n_over_d", "scores_4n2_gib", *compared, "expected")
    return Table(name, "Naive attention: formula and measurement", columns, list(cells.values()))


def shown(value: Cell) -> str:
    """Formats one cell of the tables in ablation.md and ablation.html."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def markdown(parts: list[Part], head: dict[str, str]) -> str:
    blocks = ["\n".join(header("Attention: memory and speed", head))]
    for part in parts:
        blocks += [f"![{part.name}]({part.name}.png)\n", *(f"{text}\n" for text in part.explanations)]
        blocks += [table.markdown() for table in part.tables]
    return "\n".join(blocks)


def page(parts: list[Part], head: dict[str, str], pictures: list[bytes]) -> str:
    """Returns an HTML file that needs no other files."""
    facts = "".join(f"<li>{escape(key)}: <code>{escape(value)}</code></li>" for key, value in head.items())
    body = ""
    for part, picture in zip(parts, pictures, strict=True):
        body += f'<img alt="{part.name}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">\n'
        body += "".join(f"<p>{escape(text)}</p>\n" for text in part.explanations)
        body += "".join(table.html() for table in part.tables)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Attention: memory and speed</title>
<link rel="icon" href="data:,">
<style>body {{ font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
img {{ max-width: 100% }} td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }}
table {{ border-collapse: collapse }}</style></head>
<body><h1>Attention: memory and speed</h1>
<ul>{facts}</ul>
{body}</body></html>
"""


def write_files(parts: list[Part], head: dict[str, str], folder: Path) -> None:
    """Writes ablation.md, ablation.html, a CSV file for each table, and a PNG file for each element of `parts`."""
    for part in parts:
        for table in part.tables:
            table.write_csv(folder)
        part.picture.savefig(folder / f"{part.name}.png")
    pictures = [(folder / f"{part.name}.png").read_bytes() for part in parts]
    (folder / "ablation.md").write_text(markdown(parts, head), encoding="utf-8")
    (folder / "ablation.html").write_text(page(parts, head, pictures), encoding="utf-8")


def draw_steps(rows: list[Row[StepCase]], formula: Formula, device_bytes: int, title: str) -> Figure:
    """Plots memory, tokens/s and MFU against sequence length on logarithmic axes."""
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(STEP_PANELS)))
    for panel, quantity in zip(panels, STEP_PANELS, strict=True):
        _draw_panel(panel, rows, quantity)
        panel.set_ylabel(LABELS[quantity])
        panel.set_xlabel("sequence length (tokens)")
    _draw_formula(panels[0], rows, formula, device_bytes)
    _finish(figure, panels[0], title)
    return figure


def draw_attention(rows: list[Row[AttentionCase]], device_bytes: int, title: str) -> Figure:
    """Plots the memory and time of forward and backward against sequence length, in one column for each shape."""
    shapes = list(dict.fromkeys(case.shape for case, _ in rows))
    figure = Figure(figsize=(1 + 4.5 * len(shapes), 14), layout="constrained")
    grid = figure.subplots(len(ATTENTION_PANELS), len(shapes), sharex=True, sharey="row", squeeze=False)
    for quantity, line in zip(ATTENTION_PANELS, grid, strict=True):
        for shape, panel in zip(shapes, line, strict=True):
            mine = [(case, result) for case, result in rows if case.shape == shape]
            _draw_panel(panel, mine, quantity)
            formulas = dict(attention_formulas(mine[0][0]))
            if quantity in formulas:
                _draw_formula(panel, mine, formulas[quantity], device_bytes)
        line[0].set_ylabel(LABELS[quantity] if quantity in FORWARD else f"{LABELS[quantity]}, forward + backward")
    for shape, top, bottom in zip(shapes, grid[0], grid[-1], strict=True):
        top.set_title(shape)
        bottom.set_xlabel("sequence length (tokens)")
    _finish(figure, grid[0][0], title)
    return figure


def _finish(figure: Figure, panel: Axes, title: str) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.suptitle(title)


def _draw_formula(axes: Axes, rows: list[Row[AnyCase]], formula: Formula, device_bytes: int) -> None:
    # leave out values above four times the device's memory, which would flatten the other lines
    lengths = [n for n in _lengths(rows) if formula.peak(n) < 4 * device_bytes]
    axes.plot(lengths, [formula.peak(n) / GIB for n in lengths], "k:", label="naive, predicted least")
    axes.axhline(device_bytes / GIB, color="#888888", linestyle="--", label="the device's memory")
    fails_at = formula.fails_at(device_bytes)
    if fails_at <= max(_lengths(rows)):
        axes.axvline(fails_at, color="#888888", linestyle=":", label="naive must fail from here")


def _draw_panel(axes: Axes, rows: list[Row[AnyCase]], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    above = axes.get_xaxis_transform()  # x coordinates in tokens, y as a fraction of the plot's height
    for attention in dict.fromkeys(case.attention for case, _ in rows):
        color, marker = STYLES.get(attention, ("#0072B2", "X"))
        mine = [(case.seq_len, result) for case, result in rows if case.attention == attention]
        done = [(n, getattr(result, quantity)) for n, result in mine if has(result, quantity)]
        axes.plot([n for n, _ in done], [y for _, y in done], color=color, marker=marker, label=attention)
        for n in (n for n, result in mine if result.oom and not has(result, quantity)):
            axes.plot([n], [0.9], color=color, marker=marker, fillstyle="none", transform=above)
            axes.text(n, 0.93, "OOM", color=color, ha="center", va="bottom", transform=above)
    if not any(has(result, quantity) for _, result in rows):
        is_done = any(result.outcome == "ok" for _, result in rows)
        text = "unknown on this device" if is_done else "no case was measured"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    lengths = _lengths(rows)
    axes.set_xticks(lengths, [length_label(n) for n in lengths])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)  # the x axis also covers lengths without a point
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#dddddd", linewidth=0.6)


def length_label(n: int) -> str:
    """Formats a number of tokens, for example 1024 as 1k and 1048576 as 1M."""
    return f"{n >> 20}M" if n % 2**20 == 0 else f"{n >> 10}k" if n % 2**10 == 0 else str(n)


def _lengths(rows: list[Row[AnyCase]]) -> list[int]:
    return sorted({case.seq_len for case, _ in rows})


def has(result: Result, quantity: str) -> bool:
    """Returns whether the result holds a measured value of this quantity.

    If a case ran out of memory, its peak_gib does not count as a measured value.
    """
    return getattr(result, quantity) is not None and (result.outcome == "ok" or quantity in FORWARD)


def chart(names: list[str], rows: list[Row[AnyCase]], quantity: str, device_bytes: int) -> Chart:
    """Returns a chart in which each name has a line of results, and a line of the cases that ran out of memory."""
    oom_at = device_bytes / GIB if quantity.endswith("peak_gib") else 0.0
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    together = sorted(zip(names, rows, strict=True), key=lambda pair: order[pair[0]])
    for name, pairs in groupby(together, key=lambda pair: pair[0]):
        mine = [(case.seq_len, result) for _, (case, result) in pairs]
        lines.append((name, [(n, getattr(result, quantity)) for n, result in mine if has(result, quantity)]))
        lines.append((f"{name} OOM", [(n, oom_at) for n, result in mine if result.oom and not has(result, quantity)]))
    lines = [(name, points) for name, points in lines if points]
    xs, ys = [[n for n, _ in points] for _, points in lines], [[y for _, y in points] for _, points in lines]
    return Chart(LABELS[quantity], xs, ys, [name for name, _ in lines])


class Records:
    """Writes one Weights & Biases run for each case and one summary run, all in one group."""

    def __init__(self, mode: str | None, project: str, group: str, folder: Path, entity: str | None = None) -> None:
        """mode: the mode of wandb.init, or None to write no runs. entity: the team, or None for the user's default."""
        self.mode, self.project, self.group, self.folder, self.entity = mode, project, group, folder, entity

    def start(self, name: str, job_type: str, tags: list[str], config: dict[str, Any]) -> Any:
        import wandb

        # without an id, all runs would become the run that WANDB_RUN_ID names
        return wandb.init(
            id=secrets.token_hex(4), entity=self.entity, project=self.project, group=self.group, name=name,
            job_type=job_type, tags=tags, config=config, dir=self.folder, mode=cast(Any, self.mode),
            settings=wandb.Settings(init_timeout=60, silent=True),
        )  # fmt: skip

    def case(self, case: Case, result: Result) -> None:
        if self.mode is None:
            return
        tags = [case.KIND, *(f"{name}={getattr(case, name)}" for name in case.COLUMNS)]
        tags += [f"model={case.model}"] if isinstance(case, StepCase) else []
        run = self.start(case.name, "case", tags, asdict(case))
        measured = asdict(result) | {"oom": int(result.oom)}
        run.log({name: value for name, value in measured.items() if isinstance(value, int | float)})
        run.summary["outcome"] = result.outcome
        run.finish()

    def summary(self, parts: list[Part], head: dict[str, str]) -> None:
        """Logs all tables and charts, and the PNG and HTML files that write_files has written."""
        if self.mode is None:
            return
        import wandb

        run = self.start("summary", "summary", ["summary", *(part.name for part in parts)], dict(head))
        html = (self.folder / "ablation.html").read_text(encoding="utf-8")
        logged: dict[str, Any] = {"page": wandb.Html(html, inject=False)}
        for part in parts:
            logged[f"picture/{part.name}"] = wandb.Image(str(self.folder / f"{part.name}.png"))
            for table in part.tables:
                logged[f"table/{table.name}"] = wandb.Table(columns=[*table.columns], data=table.rows)
            for name, lines in part.charts.items():
                if lines.keys:
                    logged[f"chart/{name}"] = wandb.plot.line_series(
                        lines.xs, lines.ys, lines.keys, lines.label, "sequence length (tokens)"
                    )
        run.log(logged)
        run.finish()
