"""Summarizes the jobs of a Hydra multirun in one table."""

import csv
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from fa_train.parallel.ranks import given_rank

FILE = "sweep.csv"
# in seconds; a new file's modification time can be too early by this much, because the system's clock is coarse
CLOCK_STEP = 0.02
# maps a metric of result.json to a column of the printed table, and to the format of the column's values
PRINTED = {
    "train/loss": ("loss", ".4f"),
    "val/loss": ("val", ".4f"),
    "perf/tokens_per_s": ("tokens/s", ",.0f"),
    "perf/peak_gib": ("peak GiB", ".2f"),
}
Row = dict[str, Any]


_unprinted: dict[Path, list[Row]] = {}  # {path of a sweep.csv: its rows, which print_tables has not printed yet}


class SweepTable(Callback):
    """A Hydra callback that writes sweep.csv to a multirun's folder, and collects the rows for `print_tables`.

    The file has one row per job: the job's number, its overrides, its outcome, and the metrics of its result.json. The
    file is written again after each job, so that it is complete even if a later job fails. If the folder already has a
    sweep.csv of an earlier multirun, the old file gets the first free name of sweep-1.csv, sweep-2.csv and so on. A
    sweep with `sweep_job`, such as experiment=ablate_attention, writes its own report instead.
    """

    def __init__(self) -> None:
        self._job_start = 0.0  # seconds since the epoch

    def on_job_start(self, config: DictConfig, **others: Any) -> None:
        self._job_start = time.time()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **others: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN or "sweep_job" in config or given_rank() not in (None, "0"):
            return
        path = Path(config.hydra.sweep.dir, FILE)
        if path not in _unprinted and path.exists():
            names = (path.with_name(f"{path.stem}-{i}.csv") for i in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))
        rows = _unprinted.setdefault(path, [])
        rows.append(row_of(config, job_return, self._job_start))
        write(rows, path)
        if job_return.status == JobStatus.FAILED:
            print(f"job {config.hydra.job.num} failed: {rows[-1]['outcome']}. See {path}", file=sys.stderr)


def print_tables() -> None:
    """Prints the table of each multirun whose table is not printed yet, and the path of its sweep.csv.

    Call this function after a multirun, even if the multirun has raised an error. Hydra calls on_multirun_end only if
    no job has failed.
    """
    while _unprinted:
        path, rows = _unprinted.popitem()
        print(table(rows), f"sweep: {path}", sep="\n", flush=True)


def row_of(config: DictConfig, job_return: JobReturn, start: float) -> Row:
    """Returns the row of a finished job. `outcome` is "ok", "oom", or the error of a failed job.

    start: when the job started, in seconds since the epoch. A result.json that is older than `start` is not
    used, because an earlier job in the same folder wrote it.
    """
    overrides = dict(text.lstrip("+").split("=", 1) for text in job_return.overrides or () if "=" in text)
    file = Path(config.hydra.runtime.output_dir, "result.json")
    is_new = file.exists() and file.stat().st_mtime >= start - CLOCK_STEP
    metrics = json.loads(file.read_text(encoding="utf-8")) if is_new else {}
    outcome = "oom" if "oom" in metrics else "ok"
    if job_return.status == JobStatus.FAILED:
        error: BaseException = job_return._return_value  # job_return.return_value would raise the job's error
        while isinstance(error, InstantiationException) and error.__cause__ is not None:
            error = error.__cause__  # the error that the function of the `_target_` raised
        outcome = " ".join(f"{type(error).__name__}: {error}".split())  # the printed table has one line per job
    return {"job": config.hydra.job.num, **overrides, "outcome": outcome, **metrics}


def write(rows: list[Row], path: Path) -> None:
    """Writes all rows to a CSV file. If a job has no value for a column, the cell is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[Row]) -> str:
    """Formats the overrides that differ between jobs, the outcomes and the metrics of `PRINTED`, in aligned columns."""
    overrides = dict.fromkeys(name for row in rows for name in list(row)[1 : list(row).index("outcome")])
    varied = [name for name in overrides if len({row.get(name) for row in rows}) > 1]
    metrics = {name: shown for name, shown in PRINTED.items() if any(name in row for row in rows)}
    lines = [["job", *varied, *(title for title, _ in metrics.values()), "outcome"]]
    for row in rows:
        numbers = [format(row[name], kind) if name in row else "" for name, (_, kind) in metrics.items()]
        lines.append([str(row["job"]), *(row.get(name, "") for name in varied), *numbers, row["outcome"]])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
