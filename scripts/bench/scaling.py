"""Compares the speed of train.py on all GPUs with its speed on one GPU, and its memory with the planner's prediction.

    python -m scripts.bench.scaling                                         # llama_1b and llama_8b on all GPUs.
    python -m scripts.bench.scaling --cases llama_1b:8192:ddp llama_1b:32768:fsdp --parallel    # two cases.
    python -m scripts.bench.scaling --cases llama_1b:8192:fsdp -- strategy.reduce_once=true    # one override.
    python -m scripts.bench.scaling --cases llama_1b:262144:fsdp,strategy.context=2,memory=full    # shared rows.

A case is MODEL:SEQ_LEN:STRATEGY[,OVERRIDE]... Each case needs two runs of train.py, one on one GPU and one on all GPUs.
A run on one GPU ignores STRATEGY and overrides of strategy.*. In each step, every GPU trains on --rows rows of random
tokens. With strategy.context=N, every group of N GPUs trains on --rows rows together. Each run is a new process with
logger=csv, without validation and without checkpoints.

The column `of ideal` is the tokens/s of N GPUs, divided by N times the tokens/s of one GPU. Times are medians over the
log entries of the timed steps. The first third of the steps is not timed. The columns of step time, data wait,
communication and compute show the mean over the ranks and, in brackets, the largest value of any rank. The peak of a
rank is the peak memory of torch's allocator over all steps. `plan` is the planner's prediction of a rank's peak. The
error of the plan is the largest error over the ranks.

The script writes OUT.csv and OUT.md after every run, and keeps the log and metrics.csv of each run in the folder
OUT_runs.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.config_options import options
from fa_train.errors import errors_in_one_line
from fa_train.memory.planner.predict import GIB, predict
from scripts.bench.command_line import (
    REPOSITORY,
    add_results,
    add_time_limits,
    require_overrides,
    require_positive,
    sigterm_raises,
)
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.scaling_report import Row, cells, page, write
from scripts.bench.timing import require_gpu
from scripts.composed import composed
from scripts.memory_table import as_run, memory_of_gpu, plan_of_run

CASES = (
    "llama_1b:8192:ddp",
    "llama_1b:8192:fsdp",
    "llama_1b:32768:ddp",
    "llama_1b:32768:fsdp",
    # one GPU with 80 GB must hold the whole model, so weights and optimizer states are bf16
    "llama_8b:8192:fsdp,trainer.precision=bf16-true,optimizer=adamw_bf16,memory=selective",
)
STRATEGIES = "ddp", "fsdp"
CONTEXT = "strategy.context"  # the config key for the number of GPUs that compute each row together
ONE = ("auto",)  # the strategy of runs on one GPU
LOGS = 12  # number of log entries in a run, if the run has enough steps
FAILED_LINES = 15  # how many lines are printed from the end of a failed run's log
MISTAKES = ValueError, HydraException, OmegaConfBaseException
MEDIANS = {
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
    "slowest_over_mean": "perf/slowest_over_mean",
    **{
        name + suffix: f"perf/{name}{suffix}"
        for name in ("step_ms", "data_wait_ms", "communication_ms", "compute_ms", "host_gib")
        for suffix in ("", "_max")
    },
}


@dataclass(frozen=True)
class Workload:
    """The model, sequence length and overrides of a case, without overrides of strategy.*."""

    model: str
    seq_len: int  # tokens
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    workload: Workload
    strategy: tuple[str, ...]  # the strategy's name, and the case's overrides of strategy.*


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    rows: rows per step on each GPU, or on each group of GPUs that share their rows. common: overrides for all runs.
    cpu: whether the ranks are processes on the CPU.
    """

    workload: Workload
    strategy: tuple[str, ...]  # as in Case; `ONE` on one GPU
    gpus: int
    rows: int
    steps: int
    common: tuple[str, ...] = ()
    cpu: bool = False
    gpu: int | None = None  # the index of the GPU that the run must use, or None if the run may use any GPU

    @property
    def warm_up(self) -> int:
        return self.steps // 3

    @property
    def batch_size(self) -> int:
        """The number of rows per step on all GPUs."""
        values = [override.partition("=")[2] for override in self._overrides() if key_of(override) == CONTEXT]
        context = int(values[-1]) if values and values[-1].isdecimal() else 1  # train.py refuses other values
        return self.rows * self.gpus // max(1, context)

    @property
    def name(self) -> str:
        return f"{self.workload.model}_{self.workload.seq_len}_{self.strategy[0]}_{self.gpus}"

    def arguments(self) -> list[str]:
        """Returns the overrides of train.py, except for the one that sets the run's folder."""
        return [
            f"preset={'cpu' if self.cpu else 'gpu'}",
            f"model={self.workload.model}",
            "data=synthetic",
            f"seq_len={self.workload.seq_len}",
            f"batch_size={self.batch_size}",
            f"max_steps={self.steps}",
            f"strategy={self.strategy[0]}",
            f"trainer.accelerator={'cpu' if self.cpu else 'gpu'}",
            f"trainer.devices={self.gpus}",
            f"trainer.log_every_n_steps={max(1, self.steps // LOGS)}",
            "++trainer.limit_val_batches=0",
            "++trainer.enable_checkpointing=false",
            "callbacks.checkpoint=null",
            "logger=csv",
            "+callbacks.rank_memory._target_=scripts.bench.rank_memory.RankMemory",
            *self._overrides(),
        ]

    def _overrides(self) -> list[str]:
        common = [override for override in self.common if self.gpus > 1 or not sets_strategy(override)]
        return [*self.workload.overrides, *self.strategy[1:], *common]


def parse_case(text: str) -> Case:
    """Parses MODEL:SEQ_LEN:STRATEGY[,OVERRIDE]... Raises: ValueError on anything else."""
    name, *overrides = text.split(",")
    model, seq_len, strategy = [*name.split(":"), "", ""][:3]
    is_valid = name.count(":") == 2 and model in options("model") and strategy in STRATEGIES
    is_valid = is_valid and seq_len.isdecimal() and int(seq_len) > 0 and all("=" in x for x in overrides)
    if not is_valid:
        raise ValueError(
            "a case must be MODEL:SEQ_LEN:STRATEGY[,OVERRIDE]... with a model of conf/model, a positive length and "
            f"{' or '.join(STRATEGIES)}; got {text}"
        )
    settings = [override for override in overrides if sets_strategy(override)]
    workload = Workload(model, int(seq_len), tuple(override for override in overrides if override not in settings))
    return Case(workload, (strategy, *settings))


def sets_strategy(override: str) -> bool:
    """Returns whether an override sets a key of strategy.*."""
    return key_of(override).startswith("strategy.")


def key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def runs_of(cases: Sequence[Case], args: argparse.Namespace, gpus: int) -> list[Run]:
    """Returns the runs that the cases need, in random order.

    The runs that use only one GPU are adjacent in the list, so that --parallel can start several of these runs at the
    same time.
    """
    sizes = args.rows, args.steps, tuple(args.overrides), args.cpu_ranks is not None
    own: list[int | None] = [*range(gpus)] if args.every_gpu else [None]
    workloads = dict.fromkeys(case.workload for case in cases)
    alone = [Run(workload, ONE, 1, *sizes, gpu) for workload in workloads for gpu in own]
    together = [Run(case.workload, case.strategy, gpus, *sizes) for case in dict.fromkeys(cases)]
    generator = random.Random(args.seed)
    groups = [generator.sample(runs, len(runs)) for runs in (alone, together)]
    generator.shuffle(groups)
    return [run for group in groups for run in group]


def predicted_gib(run: Run) -> float | None:
    """Returns the peak that the planner predicts for a rank, in GiB.

    Returns None if the run uses the CPU or has memory=auto.
    Raises: ValueError, HydraException or OmegaConfBaseException if an override is wrong.
    """
    cfg = composed(run.arguments())
    if run.cpu or cfg.memory.get("auto"):
        return None
    return predict(as_run(plan_of_run(cfg), cfg, memory_of_gpu())).allocated / GIB


class Process:
    """A run of train.py in a new session, and the GPUs that the run uses. The constructor starts the run."""

    def __init__(self, run: Run, gpus: Sequence[int], timeout: float, folder: Path) -> None:
        self.run, self.gpus, self.timeout, self.folder = run, gpus, timeout, folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.log = folder / "output.log"
        command = [sys.executable, str(REPOSITORY / "train.py"), *run.arguments(), f"hydra.run.dir={folder}"]
        self._start = time.monotonic()
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=os.environ | ({} if run.cpu else {"CUDA_VISIBLE_DEVICES": visible(gpus)}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def result(self, predicted: float | None) -> Row | None:
        """Returns the row of the run, or None while the run goes on. Kills the run after `timeout` seconds."""
        status, seconds = self._process.poll(), time.monotonic() - self._start
        if status is None and seconds < self.timeout:
            return None
        row = row_of(self.run, self.gpus, seconds, predicted)
        if status == 0:
            return measured(row, self.run.warm_up, self.folder)
        self.kill()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        reason = (errors or lines or [f"exit status {status}"])[-1].removeprefix("error: ")
        if status is None:
            reason = f"timed out after {self.timeout:.0f} s"
        print("\n".join([f"--- {self.log}", *lines[-FAILED_LINES:], "---"]), file=sys.stderr, flush=True)
        return replace(row, outcome=f"failed: {reason}")

    def kill(self) -> None:
        """Ranks end when their launcher is killed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def visible(gpus: Sequence[int]) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for a run on these GPUs.

    gpus: indices among the GPUs that this process sees.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = names.split(",") if names else None
    return ",".join(seen[gpu].strip() if seen else str(gpu) for gpu in gpus)


def results(runs: Sequence[Run], predictions: dict[Run, float | None], args: argparse.Namespace) -> Iterator[Row]:
    """Starts all runs, and yields the row of a run when the run ends.

    Runs start in the given order, each as soon as its GPUs are free.
    """
    end = time.monotonic() + args.budget
    free, waiting = set(range(max(run.gpus for run in runs))), list(runs)
    running: list[Process] = []
    try:
        while waiting or running:
            remaining = end - time.monotonic()
            if waiting and remaining <= 0:
                print(
                    f"the time of --budget is over; left out: {', '.join(run.name for run in waiting)}", file=sys.stderr
                )
                waiting.clear()
            if waiting and (args.parallel or not running) and (gpus := gpus_for(waiting[0], free)):
                run, free = waiting.pop(0), free - set(gpus)
                folder = Path(f"{args.out}_runs", f"{len(runs) - len(waiting):02d}_{run.name}")
                running.append(Process(run, gpus, min(args.timeout, remaining), folder))
                continue
            for process in list(running):
                if row := process.result(predictions[process.run]):
                    running.remove(process)
                    free |= set(process.gpus)
                    yield row
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()


def gpus_for(run: Run, free: set[int]) -> list[int]:
    """Returns the GPUs for a run, or an empty list if the run must wait for GPUs."""
    if run.gpu is not None:
        return [run.gpu] if run.gpu in free else []
    return sorted(free)[: run.gpus] if len(free) >= run.gpus else []


def row_of(run: Run, gpus: Sequence[int], seconds: float, predicted: float | None) -> Row:
    """Returns the row of a run, without the run's results."""
    return Row(
        model=run.workload.model,
        seq_len=run.workload.seq_len,
        overrides=" ".join(run.workload.overrides),
        strategy=" ".join(run.strategy),
        gpus=run.gpus,
        gpu=gpus[0] if run.gpus == 1 else None,
        predicted_gib=predicted,
        wall_s=seconds,
    )


def measured(row: Row, warm_up: int, folder: Path) -> Row:
    """Adds the results of a run to its row. The results are in metrics.csv and rank_memory_<rank>.json in `folder`.

    If results are missing, the row says that the run failed.
    """
    try:
        with (folder / "metrics.csv").open() as file:
            timed = timed_logs(list(csv.DictReader(file)), warm_up)
        ranks = [json.loads((folder / f"rank_memory_{rank}.json").read_text()) for rank in range(row.gpus)]
    except OSError as error:
        return replace(row, outcome=f"failed: {error}")
    if not timed:
        return replace(row, outcome=f"failed: no log of the steps after step {warm_up}")
    medians: dict[str, Any] = {field: median(timed, metric) for field, metric in MEDIANS.items()}
    rates = column(timed, MEDIANS["tokens_per_s"])
    return replace(
        row,
        **medians,
        tokens_per_s_min=min(rates),
        tokens_per_s_max=max(rates),
        skipped_steps=int(column(timed, "train/skipped_steps")[-1]),
        loss=column(timed, "train/loss")[-1],
        peaks=tuple(rank["peak_gib"] for rank in ranks),
    )


def timed_logs(metrics: Sequence[dict[str, str]], warm_up: int) -> list[dict[str, str]]:
    """Returns the rows of metrics.csv that cover only steps after the first `warm_up` steps."""
    logs = [row for row in metrics if row.get("perf/step_ms")]
    befores = [0, *(int(row["step"]) for row in logs)]
    return [row for row, before in zip(logs, befores, strict=False) if before >= warm_up]


def column(rows: Sequence[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def median(rows: Sequence[dict[str, str]], name: str) -> float | None:
    """Returns the median of a metric, or None if the run does not log it."""
    values = column(rows, name)
    return statistics.median(values) if values else None


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py for all runs; write -- before them")
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", default=list(CASES), help="MODEL:SEQ_LEN:STRATEGY[,OVERRIDE]..."
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of a run; the first third is not timed")
    parser.add_argument("--rows", type=int, default=1, help="rows per step on each GPU")
    parser.add_argument("--parallel", action="store_true", help="make one-GPU runs at the same time, on different GPUs")
    parser.add_argument(
        "--every-gpu", action="store_true", help="repeat each one-GPU run on every GPU, and use the mean"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random order of the runs")
    parser.add_argument("--cpu-ranks", type=int, help="processes on the CPU instead of GPUs, to try the script")
    add_time_limits(parser, timeout=300, budget=True)
    add_results(parser, "scripts/results/scaling_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    require_positive(parser, args, ("rows", "timeout", "budget"))
    if args.steps < 3:
        parser.error(f"--steps must be at least 3; got {args.steps}")
    require_overrides(parser, args.overrides)
    try:
        args.cases = [parse_case(case) for case in args.cases]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    sigterm_raises()
    if args.cpu_ranks is None:
        require_gpu("scripts.bench.scaling")
    gpus = args.cpu_ranks or torch.cuda.device_count()
    if gpus < 2:
        sys.exit(f"scripts.bench.scaling needs at least 2 GPUs, or --cpu-ranks of at least 2; got {gpus}")
    runs = runs_of(args.cases, args, gpus)
    with errors_in_one_line(MISTAKES):
        predictions = {run: predicted_gib(run) for run in runs}
    args.out = results_prefix(args.out, "scaling").resolve()
    head = describe("-m scripts.bench.scaling", args.commit)
    head |= {
        "GPUs": str(gpus),
        "overrides": " ".join(args.overrides) or "none",
        "rows per GPU": str(args.rows),
        "steps": f"{args.steps}, {args.steps // 3} not timed",
    }
    rows: list[Row] = []
    for row in results(runs, predictions, args):
        rows.append(row)
        print(" | ".join(cells(row, rows)), flush=True)
        write(rows, head, args.out)
    print(f"\n{page(rows, head)}\nresults: {args.out}.*")


if __name__ == "__main__":
    main()
