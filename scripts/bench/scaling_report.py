"""Holds the result of each run of scripts.bench.scaling, and formats all results as a table."""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from scripts.bench.page import header, shown

ENOUGH = 0.95  # a run counts as fast if it has at least this share of the ideal speed
CLOSE = 0.05  # a prediction within 5% of the measured peak counts as close
HEAD = (
    "case", "GPUs", "tokens/s (slowest to fastest log)", "of ideal", "step ms", "data wait ms", "communication ms",
    "compute ms", "slowest rank", "MFU", "skipped", "loss", "host GiB", "peak GiB of each rank", "plan GiB", "error",
    "wall s", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The result of one run. If the run failed, it has no metrics and no peaks. An unknown metric is None.

    Fields whose names end with _max, except tokens_per_s_max, hold the largest value of any rank. tokens_per_s_max is
    the tokens/s of the fastest log entry. Peaks are in GiB, one for each rank.
    """

    model: str
    seq_len: int
    overrides: str
    strategy: str
    gpus: int
    outcome: str = "ok"  # "ok" or "failed: REASON"
    gpu: int | None = None  # the GPU's index in a run on one GPU, else None
    tokens_per_s: float | None = None  # of all GPUs together
    tokens_per_s_min: float | None = None  # tokens/s of the slowest log entry
    tokens_per_s_max: float | None = None
    step_ms: float | None = None
    step_ms_max: float | None = None
    data_wait_ms: float | None = None
    data_wait_ms_max: float | None = None
    communication_ms: float | None = None
    communication_ms_max: float | None = None
    compute_ms: float | None = None
    compute_ms_max: float | None = None
    slowest_over_mean: float | None = None
    host_gib: float | None = None
    host_gib_max: float | None = None
    mfu: float | None = None
    skipped_steps: int | None = None
    loss: float | None = None  # loss of the last step, in nats per label
    peaks: tuple[float, ...] = ()  # over all steps
    predicted_gib: float | None = None
    wall_s: float | None = None  # of the whole process


def share_of_ideal(row: Row, rows: Sequence[Row]) -> float | None:
    """Returns the tokens/s of a run on N GPUs, divided by the ideal tokens/s. Returns None if a value is missing.

    The ideal is N times the mean tokens/s of all runs on one GPU.
    """
    alone = [
        x.tokens_per_s
        for x in rows
        if x.gpus == 1 and x.tokens_per_s and workload_of(x) == workload_of(row)
    ]  # fmt: skip
    if row.gpus == 1 or row.tokens_per_s is None or not alone:
        return None
    return row.tokens_per_s / (row.gpus * statistics.mean(alone))


def workload_of(row: Row) -> tuple[str, int, str]:
    return row.model, row.seq_len, row.overrides


def plan_error(row: Row) -> float | None:
    """Returns `predicted / measured - 1` for the rank with the largest error, or None if a value is missing."""
    if row.predicted_gib is None or not row.peaks:
        return None
    return max((row.predicted_gib / peak - 1 for peak in row.peaks), key=abs)


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Returns the cells of a table line."""
    name = " ".join([row.model, f"{row.seq_len:,}", *([row.strategy] if row.gpus > 1 else []), row.overrides]).strip()
    logs = f" ({row.tokens_per_s_min:,.0f} to {row.tokens_per_s_max:,.0f})" if row.tokens_per_s_min is not None else ""
    return [
        name,
        str(row.gpus) if row.gpu is None else f"1 (GPU {row.gpu})",
        shown(row.tokens_per_s, ",.0f") + logs,
        shown(share_of_ideal(row, rows), ".1%"),
        with_largest(row.step_ms, row.step_ms_max, ",.1f"),
        with_largest(row.data_wait_ms, row.data_wait_ms_max, ".2f"),
        with_largest(row.communication_ms, row.communication_ms_max, ".1f"),
        with_largest(row.compute_ms, row.compute_ms_max, ",.1f"),
        shown(row.slowest_over_mean, ".3f") + ("×" if row.slowest_over_mean is not None else ""),
        shown(row.mfu, ".1%"),
        shown(row.skipped_steps, "d"),
        shown(row.loss, ".4f"),
        with_largest(row.host_gib, row.host_gib_max, ".2f"),
        ", ".join(f"{peak:.2f}" for peak in row.peaks) or "–",
        shown(row.predicted_gib, ".2f"),
        shown(plan_error(row), "+.1%"),
        shown(row.wall_s, ".0f"),
        "" if row.outcome == "ok" else row.outcome.replace("|", "/"),
    ]


def with_largest(mean: float | None, largest: float | None, form: str) -> str:
    """Formats a metric of all ranks as `mean (largest value)`."""
    return shown(mean, form) + (f" ({largest:{form}})" if largest is not None else "")


def page(rows: Sequence[Row], head: dict[str, str]) -> str:
    """Formats all rows as Markdown."""
    lines = [*header("Training on several GPUs compared with one", head), *summary(rows), ""]
    lines += [f"| {' | '.join(HEAD)} |", "|:--" + "|--:" * (len(HEAD) - 2) + "|:--|"]
    ordered = sorted(rows, key=lambda row: (*workload_of(row), row.gpus, row.strategy, row.gpu or 0))
    return "\n".join([*lines, *(f"| {' | '.join(cells(row, rows))} |" for row in ordered)]) + "\n"


def summary(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence on the runs' speed relative to the ideal speed, and a sentence on the planner's errors."""
    shares = [share for row in rows if (share := share_of_ideal(row, rows)) is not None]
    errors = [abs(error) for row in rows if (error := plan_error(row)) is not None]
    lines = []
    if shares:
        fast = sum(share >= ENOUGH for share in shares)
        lines.append(f"{fast} of {len(shares)} runs reach {ENOUGH:.0%} of ideal, the lowest {min(shares):.1%}.")
    if errors:
        close = sum(error <= CLOSE for error in errors)
        lines.append(
            f"{close} of {len(errors)} plans are within {CLOSE:.0%} of every rank's peak, the worst {max(errors):.1%}."
        )
    return lines


def write(rows: Sequence[Row], head: dict[str, str], out: Path) -> None:
    """Writes OUT.csv and OUT.md. In the CSV file, spaces separate the peaks of the ranks."""
    names = [*(field.name for field in fields(Row)), "share_of_ideal", "plan_error"]
    with Path(f"{out}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            computed = {"share_of_ideal": share_of_ideal(row, rows), "plan_error": plan_error(row)}
            writer.writerow(asdict(row) | {"peaks": " ".join(map(str, row.peaks))} | computed)
    Path(f"{out}.md").write_text(page(rows, head), encoding="utf-8")
