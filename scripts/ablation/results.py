"""The results of an ablation's jobs, and the files that hold them: settings.json, and one JSON file for each job."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from scripts.ablation.formula import Formula

SETTINGS = "settings.json"


class Job(NamedTuple):
    """What distinguishes a job from the other jobs of an ablation."""

    attention: str
    seq_len: int

    @property
    def name(self) -> str:
        return f"{self.attention} {self.seq_len}"

    def path(self, folder: Path, suffix: str) -> Path:
        # the name of a config option may contain a slash
        return folder / f"{quote(self.attention, safe='')}_{self.seq_len}{suffix}"


@dataclass(frozen=True)
class Settings:
    """What the jobs of an ablation share.

    overrides: the overrides of train.py that all jobs have. title: the settings that a reader of the chart needs. gpu:
    the name of the GPU, or "no GPU". device_bytes: the memory limit of a job. formula: the minimum memory of naive
    attention.
    """

    overrides: list[str]
    title: str
    gpu: str
    device_bytes: int
    formula: Formula

    @property
    def explanation(self) -> str:
        return self.formula.explain(f"a training step of {self.title}", self.device_bytes)


@dataclass(frozen=True)
class Result:
    """The measured values of one job. If outcome is not "ok", all values except the memory are None.

    step_ms is the time of an optimizer step. mfu is also None if the peak FLOP/s of the device is unknown.
    """

    outcome: str  # "ok", "oom", "failed: REASON" or "skipped: REASON"
    peak_gib: float | None = None
    reserved_gib: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    timed_steps: int | None = None

    @property
    def oom(self) -> bool:
        return self.outcome == "oom"

    @property
    def final(self) -> bool:
        """Returns whether a continued ablation can use this result instead of running the job again."""
        return self.outcome in ("ok", "oom") or self.outcome.startswith("skipped")


def load_settings(folder: Path) -> Settings | None:
    """Returns the settings of the earlier jobs, or None if there is no earlier job."""
    path = folder / SETTINGS
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return Settings(**found | {"formula": Formula(**found["formula"])})


def save_settings(settings: Settings, folder: Path) -> None:
    _write(asdict(settings), folder / SETTINGS)


def load(folder: Path) -> dict[Job, Result]:
    """Returns the results of all jobs that have ended."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in _files(folder)]
    return {Job(**each["job"]): Result(**each["result"]) for each in found}


def remove(folder: Path) -> None:
    """Removes the results of all jobs."""
    for path in _files(folder):
        path.unlink()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if path.name != SETTINGS]


def save(job: Job, result: Result, folder: Path) -> None:
    _write({"job": job._asdict(), "result": asdict(result)}, job.path(folder, ".json"))


def _write(values: dict[str, Any], path: Path) -> None:
    """Replaces the file atomically, so that an interruption leaves no incomplete file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(values) + "\n", encoding="utf-8")
    new.replace(path)


def skipped(job: Job, results: Mapping[Job, Result]) -> Result | None:
    """Returns a "skipped" result if a shorter job with the same attention ran out of memory, otherwise None."""
    lengths = [other.seq_len for other, result in results.items() if result.oom and other.attention == job.attention]
    shorter = min(lengths, default=job.seq_len)
    return Result(f"skipped: {shorter} ran out of memory") if shorter < job.seq_len else None
