"""Trains for some minutes and checks that memory and speed stay constant: python -m scripts.soak [override ...]

    python -m scripts.soak --minutes 9                        # the preset of this machine, on Python's own source
    python -m scripts.soak --minutes 9 model=llama_1b seq_len=32768 batch_size=1

The run validates and writes a checkpoint every 50 steps, and packs new documents in each step. The first third of the
run is warm-up. The second and the last third must agree: the median step time within 3%, the lowest host memory within
2%, and on a GPU the reserved memory exactly. Host memory is summed over all processes of the run; shared pages count
once. Its lowest value is compared, since each checkpoint needs more memory for a short time. The script writes OUT.md,
and exits with 1 if the two thirds do not agree.
"""

import argparse
import csv
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from scripts.bench.command_line import add_results
from scripts.bench.provenance import describe

REPOSITORY = Path(__file__).resolve().parents[1]
EVERY = 50  # steps between validations, and between checkpoints
SAMPLE = 5.0  # seconds between samples of host memory
GIB = 2**30
LIMITS = {"step_ms": 0.03, "host_gib": 0.02, "reserved_gib": 0.0}  # change between the second and the last third


@dataclass(frozen=True)
class Change:
    """A value in the second and in the last third of a run: the lowest host memory, or a median."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_small(self) -> bool:
        return abs(self.ratio - 1) <= LIMITS[self.name]


def soak(overrides: list[str], minutes: float, folder: Path) -> list[Change]:
    """Runs train.py in `folder` for `minutes`, then interrupts it. Raises: RuntimeError if train.py ends earlier."""
    command = [
        sys.executable, str(REPOSITORY / "train.py"), "logger=csv", "max_steps=1000000", "trainer.log_every_n_steps=10",
        f"trainer.val_check_interval={EVERY}", f"callbacks.checkpoint.every_n_train_steps={EVERY}", *overrides,
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    host: list[float] = []
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    end = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < end:
            time.sleep(SAMPLE)
            if process.poll() is not None:
                raise RuntimeError(f"train.py must train until it is interrupted; it ended with {process.returncode}")
            host.append(memory_of_session(process.pid) / GIB)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return changes(folder / "metrics.csv", host)


def memory_of_session(leader: int) -> float:
    """Returns the bytes that the processes of a session hold in memory.

    A page shared by n processes counts 1/n in each.
    """
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == leader:
                rollup = (stat.parent / "smaps_rollup").read_text()
                total += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    return total


def changes(metrics: Path, host: list[float]) -> list[Change]:
    """Compares the thirds of a run by its metrics.csv and the samples of its host memory."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    series = {
        "step_ms": column(rows, "perf/step_ms"),
        "host_gib": host,
        "reserved_gib": column(rows, "perf/reserved_gib"),
    }
    summaries = {"host_gib": min}
    return [
        Change(name, *thirds(values, summaries.get(name, statistics.median)))
        for name, values in series.items()
        if values
    ]


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    """Returns the values of a column from the rows that have one."""
    return [float(row[name]) for row in rows if row.get(name)]


def thirds(values: list[float], summary: Callable[[list[float]], float]) -> tuple[float, float]:
    """Returns a summary of the second and of the last third. Raises: RuntimeError on fewer than nine values."""
    if len(values) < 9:
        raise RuntimeError(f"a soak test needs at least nine samples; got {len(values)}. Increase --minutes")
    n = len(values) // 3
    return summary(values[n : 2 * n]), summary(values[-n:])


def markdown(head: dict[str, str], found: list[Change], metrics: Path) -> str:
    with metrics.open() as file:
        steps = max(int(row["step"]) for row in csv.DictReader(file))
    lines = ["# Soak", "", *(f"- {key}: `{value}`" for key, value in head.items()), "", f"{steps} steps.", ""]
    lines += ["| | second third | last third | ratio | allowed |", "|:--|--:|--:|--:|--:|"]
    for x in found:
        lines.append(f"| {x.name} | {x.before:.3f} | {x.after:.3f} | {x.ratio:.4f} | ±{LIMITS[x.name]:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    parser.add_argument("--minutes", type=float, default=9, help="training time, including startup")
    add_results(parser, Path("soak"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        try:
            found = soak(arguments.overrides, arguments.minutes, folder)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        head = describe(shlex.join(["python", "-m", "scripts.soak", *sys.argv[1:]]), arguments.commit, date.today())
        page = markdown(head, found, folder / "metrics.csv")
    Path(f"{arguments.out}.md").write_text(page, encoding="utf-8")
    print(page)
    sys.exit(0 if all(change.is_small for change in found) else 1)


if __name__ == "__main__":
    main()
