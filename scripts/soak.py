"""Trains for some minutes and checks that memory and speed stay constant (python -m scripts.soak [override ...]).

    python -m scripts.soak --minutes 9                        # train.py's default model and data.
    python -m scripts.soak --minutes 9 model=llama_1b seq_len=32768 batch_size=1    # another model.

Every 50 steps, the run validates and writes a checkpoint. The script compares the second third of the run with the last
third. Between the second and the last third, the median step time may differ by at most 3%, and the lowest host memory
by at most 2%. On a GPU, the median of the memory that torch reserves must be equal in the second and the last third of
the run. Host memory is compared by its lowest values, because checkpoints raise it for a short time. The script writes
OUT.md. The script ends with status 1 if a difference is larger than allowed.

Host memory is the anonymous and the shared memory of all processes of the run. Mapped files, such as libraries and
tokens, are listed but not compared. If n processes of the machine use a page of a mapped file, each process counts 1/n
of the page. The counted memory of the run's mapped files thus depends on processes outside the run. The script also
writes OUT.csv, which has the memory of each process in each sample.
"""

import argparse
import csv
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.bench.command_line import REPOSITORY, add_results, sigterm_raises
from scripts.bench.page import header
from scripts.bench.provenance import describe

TRAINING, WORKERS, OTHERS = "training process", "data workers", "other processes"  # such as compilers
KINDS = {"anonymous_gib": "Pss_Anon", "shared_gib": "Pss_Shmem", "files_gib": "Pss_File"}  # the names in smaps_rollup
EVERY = 50  # steps between two validations, and between two checkpoints
SAMPLE = 5.0  # seconds between two samples of host memory
LIMITS = {"step_ms": 0.03, "host_gib": 0.02, "reserved_gib": 0.0}  # largest allowed relative changes


@dataclass(frozen=True)
class Change:
    """The value of a quantity in the second third of a run (`before`), and its value in the last third (`after`)."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_small(self) -> bool:
        return abs(self.ratio - 1) <= LIMITS[self.name]


@dataclass(frozen=True)
class ProcessMemory:
    """The host memory of one process in GiB. If n processes share a page, each process counts 1/n of the page."""

    pid: int
    process: str  # TRAINING, WORKERS or OTHERS
    anonymous_gib: float  # Python objects and tensors
    shared_gib: float  # pages of /dev/shm, such as batches on their way from a data worker
    files_gib: float  # libraries and memory-mapped tokens


@dataclass(frozen=True)
class Sample:
    """The host memory of all processes of a run, `seconds` after the start of the run."""

    seconds: float
    processes: list[ProcessMemory]

    def total(self, kind: str, process: str | None = None) -> float:
        return sum(getattr(x, kind) for x in self.processes if process in (None, x.process))

    @property
    def host_gib(self) -> float:
        return self.total("anonymous_gib") + self.total("shared_gib")


def soak(overrides: list[str], minutes: float, folder: Path) -> list[Sample]:
    """Runs train.py in `folder` for `minutes`, then interrupts it. Returns the samples of host memory.

    Raises: RuntimeError if train.py ends before `minutes` have passed.
    """
    command = [
        sys.executable, str(REPOSITORY / "train.py"), "logger=csv", "max_steps=1000000", "trainer.log_every_n_steps=10",
        f"trainer.val_check_interval={EVERY}", f"callbacks.checkpoint.every_n_train_steps={EVERY}", *overrides,
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    samples: list[Sample] = []
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    start = time.monotonic()
    try:
        while time.monotonic() < start + 60 * minutes:
            time.sleep(SAMPLE)
            if process.poll() is not None:
                raise RuntimeError(
                    f"train.py must train until it is interrupted; it ended with exit status {process.returncode}"
                )
            samples.append(Sample(time.monotonic() - start, memory_of_session(process.pid)))
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return samples


def memory_of_session(leader: int) -> list[ProcessMemory]:
    """Returns the host memory of each process of a Unix session.

    Data workers have the same command line as the process `leader`, because that process forks them.
    """
    found = []
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session != leader:
                continue
            rollup = (folder / "smaps_rollup").read_text()
            is_forked = (folder / "cmdline").read_bytes() == Path(f"/proc/{leader}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(folder.name)
        process = TRAINING if pid == leader else WORKERS if is_forked else OTHERS
        kib = {kind: int(rollup.partition(f"\n{name}:")[2].split()[0]) for kind, name in KINDS.items()}
        found.append(ProcessMemory(pid, process, **{kind: round(x / 2**20, 5) for kind, x in kib.items()}))
    return found


def changes(metrics: Path, host: list[float]) -> list[Change]:
    """Compares the second third of a run with the last third. `host` holds samples of host memory in GiB."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    series: dict[str, tuple[list[float], Callable[[list[float]], float]]] = {
        "step_ms": (column(rows, "perf/step_ms"), statistics.median),
        "host_gib": (host, min),
        "reserved_gib": (column(rows, "perf/reserved_gib"), statistics.median),
    }
    return [Change(name, *thirds(values, summary)) for name, (values, summary) in series.items() if values]


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    """Returns the values of a CSV column."""
    return [float(row[name]) for row in rows if row.get(name)]


def thirds(values: list[float], summary: Callable[[list[float]], float]) -> tuple[float, float]:
    """Returns a summary (such as the median) of the second third and of the last third of `values`.

    Raises: RuntimeError if there are fewer than nine values.
    """
    if len(values) < 9:
        raise RuntimeError(f"a soak test needs at least nine samples; got {len(values)}. Increase --minutes")
    n = len(values) // 3
    return summary(values[n : 2 * n]), summary(values[-n:])


def markdown(head: dict[str, str], found: list[Change], samples: list[Sample], metrics: Path) -> str:
    with metrics.open() as file:
        steps = max(int(row["step"]) for row in csv.DictReader(file))
    lines = [*header("Soak", head), f"{steps} steps.", ""]
    lines += ["| | second third | last third | ratio | allowed |", "|:--|--:|--:|--:|--:|"]
    for x in found:
        lines.append(f"| {x.name} | {x.before:.3f} | {x.after:.3f} | {x.ratio:.4f} | ±{LIMITS[x.name]:.0%} |")
    lines += ["", "Host memory in GiB, lowest value of each third:", ""]
    lines += ["| processes | memory | second third | last third |", "|:--|:--|--:|--:|"]
    for process in (TRAINING, WORKERS, OTHERS):
        for kind in KINDS:
            before, after = thirds([sample.total(kind, process) for sample in samples], min)
            lines.append(f"| {process} | {kind.removesuffix('_gib')} | {before:.3f} | {after:.3f} |")
    return "\n".join(lines) + "\n"


def write_samples(samples: list[Sample], path: Path) -> None:
    """Writes a row for each process in each sample."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["seconds", *(field.name for field in fields(ProcessMemory))])
        writer.writeheader()
        for sample in samples:
            writer.writerows({"seconds": round(sample.seconds, 1), **asdict(x)} for x in sample.processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    parser.add_argument("--minutes", type=float, default=9, help="training time, including startup")
    add_results(parser, Path("soak"))
    arguments = parser.parse_args()
    sigterm_raises()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        try:
            samples = soak(arguments.overrides, arguments.minutes, folder)
            write_samples(samples, Path(f"{arguments.out}.csv"))
            found = changes(folder / "metrics.csv", [sample.host_gib for sample in samples])
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        head = describe("-m scripts.soak", arguments.commit)
        page = markdown(head, found, samples, folder / "metrics.csv")
    Path(f"{arguments.out}.md").write_text(page, encoding="utf-8")
    print(page)
    sys.exit(0 if all(change.is_small for change in found) else 1)


if __name__ == "__main__":
    main()
