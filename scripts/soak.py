"""Trains for some minutes and checks that memory and speed stay constant (python -m scripts.soak [override ...]).

    python -m scripts.soak --minutes 9                        # the preset of this machine, on Python's own source
    python -m scripts.soak --minutes 9 model=llama_1b seq_len=32768 batch_size=1    # another model.

Every 50 steps, the run validates and writes a checkpoint. Each step trains on new documents. The first third of the run
is warm-up and is not compared. Three values of the second and the last third must agree. The median step time may
differ by 3%, and the lowest host memory by 2%. On a GPU, the reserved memory must be equal. Host memory is summed over
all processes of the run. Memory pages that several processes share count only once. The lowest host memory is compared,
because each checkpoint needs more memory for a short time. The script writes OUT.md. If the two thirds do not agree,
the script ends with status 1.
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
EVERY = 50  # number of steps between two validations, and between two checkpoints
SAMPLE = 5.0  # seconds between two samples of host memory
GIB = 2**30
LIMITS = {"step_ms": 0.03, "host_gib": 0.02, "reserved_gib": 0.0}  # largest allowed relative changes


@dataclass(frozen=True)
class Change:
    """One value in the second and in the last third of a run: the lowest host memory, or the median of another
    quantity.
    """

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
    """Runs train.py in `folder` for `minutes`, then interrupts it. Returns the changes between the thirds of the run.

    Raises: RuntimeError if train.py ends earlier.
    """
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
    """Returns the bytes of host memory that the processes of a Unix session hold.

    If n processes share a page, 1/n of the page counts for each.
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
    """Computes the changes between the thirds of a run, from its metrics.csv and the samples of its host memory."""
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
    """Returns the values of a CSV column, without rows that have no value there."""
    return [float(row[name]) for row in rows if row.get(name)]


def thirds(values: list[float], summary: Callable[[list[float]], float]) -> tuple[float, float]:
    """Returns a summary (such as the median) of the second third and of the last third of `values`.

    Raises: RuntimeError if there are fewer than nine values.
    """
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
