"""Profiles one training step with torch.profiler: the time of each part, a trace for Perfetto, and memory by component.

    python -m scripts.bench.profile_step model=llama_1b seq_len=32768    # llama_1b.
    python -m scripts.bench.profile_step model=gpt2 memory.offload=true hydra.run.dir=runs/profile_offload  # offload.
    torchrun --nproc-per-node=2 -m scripts.bench.profile_step trainer.devices=2 strategy=fsdp batch_size=2    # 2 GPUs.

The script takes train.py's overrides and runs train.py's model, optimizer and loop. The defaults are data=synthetic,
logger=csv and batch_size=1 (one micro-batch per step). In a folder that is not a git checkout, pass +commit=HASH to
show the commit in profile.md. The script profiles only rank 0.

In the run's folder, `profile.md` and `profile.csv` list the exclusive time of each part. Exclusive means that each
moment of the step counts for at most one part. The exclusive times of copies and communication leave out the time in
which a computing kernel runs. The column `kernels ms` shows the full time of copies and communication. `trace.json.gz`
is a trace for https://ui.perfetto.dev. `memory.png` shows the allocated memory of each component over time. The time
axis of `memory.png` is host time, because the host allocates and frees memory.

The kernels of attention, of the loss and of the optimizer are assigned to the part of the step that launches them.
Copies, communication kernels and all other kernels are assigned to parts of the step by their names. On a CPU,
the script times torch's operators instead of kernels. The time of an operator does not include the operators that it
calls.
"""

import csv
import gzip
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import train
from fa_train import run_config, training
from fa_train.callbacks.monitor import GIB
from fa_train.config_options import CONF
from fa_train.lit_gpt import LitGPT
from fa_train.models.shards import local
from scripts.bench.page import header
from scripts.bench.provenance import describe
from scripts.bench.step_memory import GRADIENTS, STATE, WEIGHTS, draw_memory, memory_over_time
from scripts.bench.step_trace import COPIES, Interval, Step, exclusive, hidden, step_of
from scripts.bench.training_case import wait

DEFAULTS = {"data": "synthetic", "logger": "csv", "batch_size": "1"}
WARMUP = 4  # steps without the profiler: two that compile and allocate, and two to compare with the profiled step
# Maximum number of lines in the table of kernels. Each line adds up the launches of one kernel in one part of the step,
# such as the loss.
TOP = 25


class StepProfiler(Callback):
    """Times `WARMUP` steps, runs one step to start the profiler, and then profiles one step of rank 0."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.milliseconds: list[float] = []  # milliseconds of the steps without the profiler
        self.before: dict[int, tuple[str, int]] = {}
        self.gradients: set[int] = set()
        self.peak = self.reserved = 0
        self._profiler: profile | None = None  # from the step that starts the profiler, on rank 0
        self._recording = False
        self._step, self._phase = ExitStack(), ExitStack()  # the open ranges of the trace

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._start_step(trainer, pl_module)
        self._enter("forward")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._phase.close()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.gradients = {_storage(p.grad).data_ptr() for p in parameters if p.grad is not None}
        self._enter("optimizer")  # including clipping

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._phase.close()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        wait(pl_module.device)
        if self._recording:
            self._stop(pl_module)
        elif trainer.global_step <= WARMUP:
            self.milliseconds.append((time.perf_counter() - self._start) * 1e3)

    def _start_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        wait(pl_module.device)
        if trainer.global_step == WARMUP and trainer.is_global_zero:  # in this step, the profiler initialises itself
            self._profiler = _profiler(pl_module.device)
            self._profiler.start()
        elif self._profiler is not None and trainer.global_step == WARMUP + 1:
            self.before = _addresses(pl_module, trainer.optimizers)
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(pl_module.device)
            self._profiler.step()
            self._recording = True
            self._step.enter_context(record_function("step"))
        self._start = time.perf_counter()

    def _stop(self, pl_module: L.LightningModule) -> None:
        assert self._profiler is not None
        self._step.close()
        self._recording = False
        self._profiler.stop()
        if pl_module.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(pl_module.device)
            self.reserved = torch.cuda.max_memory_reserved(pl_module.device)
        self._profiler.export_chrome_trace(str(self.trace))

    def _enter(self, phase: str) -> None:
        self._phase.close()
        if self._recording:
            self._phase.enter_context(record_function(f"step: {phase}"))


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), profile_memory=True)


def _addresses(module: L.LightningModule, optimizers: list[torch.optim.Optimizer]) -> dict[int, tuple[str, int]]:
    """Returns the component and the number of bytes for each address of a weight, optimizer state or gradient."""
    parameters = list(module.parameters())
    moments = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device == module.device
    ]
    # On a CPU, gradients are left out, because the allocator does not report when it frees memory that was allocated
    # before the profile.
    known = module.device.type == "cuda"
    gradients = [p.grad for p in parameters if p.grad is not None and known]
    return {
        _storage(tensor).data_ptr(): (component, _storage(tensor).nbytes())
        for component, tensors in ((WEIGHTS, parameters), (STATE, moments), (GRADIENTS, gradients))
        for tensor in tensors
    }


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local(tensor).untyped_storage()


def table(step: Step) -> list[tuple[str, float, float, float, int]]:
    """Returns a line for each part of the step.

    A line consists of the part's name, its exclusive time in ms, its share of the step's time, the time of its kernels
    in ms, and the number of its kernels.
    """
    parts, whole = exclusive(step), step.end - step.start
    kernels = durations(step.intervals, lambda interval: interval.part)
    return [(part, us / 1e3, us / whole, sum(kernels[part]) / 1e3, len(kernels[part])) for part, us in parts.items()]


def durations(intervals: Iterable[Interval], group: Callable[[Interval], Any]) -> dict[Any, list[float]]:
    """Returns the microseconds of the intervals in each group. group: returns the group of an interval."""
    found: dict[Any, list[float]] = defaultdict(list)
    for interval in intervals:
        found[group(interval)].append(interval.end - interval.start)
    return found


def report(step: Step, head: dict[str, str]) -> str:
    """Formats the text of profile.md."""
    lines = header("Time of a training step by part", head)
    kind = "kernels" if step.on_gpu else "operators"
    if step.on_gpu and (copies := sum(i.end - i.start for i in step.intervals if i.part == COPIES)):
        share = hidden(step.intervals, COPIES) / copies
        lines += [f"{share:.1%} of the copies' {copies / 1e3:.1f} ms overlapped with computing kernels.", ""]
    # On a CPU, the column for `kernels ms` is empty, because a sum over operators would count nested operators twice.
    lines += [f"| part | ms | share | {kind} | {'kernels ms' if step.on_gpu else ''} |", "|:--|--:|--:|--:|--:|"]
    rows = table(step)
    for part, ms, share, kernels_ms, number in rows:
        lines.append(f"| {part} | {ms:.2f} | {share:.1%} | {number} | {f'{kernels_ms:.2f}' if step.on_gpu else ''} |")
    lines += [f"| step | {sum(row[1] for row in rows):.2f} | 100.0% | {len(step.intervals)} | |", ""]
    if step.on_gpu:
        lines += ["| kernel | part | launches | ms | share |", "|:--|:--|--:|--:|--:|"]
        launches = durations(step.intervals, lambda interval: (interval.name, interval.part))
        for (name, part), times in sorted(launches.items(), key=lambda item: -sum(item[1]))[:TOP]:
            us, shown = sum(times), name.replace("|", "/")[:120]
            share = us / (step.end - step.start)
            lines.append(f"| `{shown}` | {part} | {len(times)} | {us / 1e3:.2f} | {share:.1%} |")
    return "\n".join(lines) + "\n"


def profile_step(cfg: DictConfig, folder: Path) -> None:
    """Trains until one step has been profiled, and writes the results to `folder`."""
    cfg.max_steps = WARMUP + 2
    cfg.callbacks.checkpoint = None
    run_config.check(cfg)
    trainer, lit_gpt, data = training.build(cfg)
    assert isinstance(lit_gpt, LitGPT)
    profiler = StepProfiler(folder / "trace.json.gz")
    # Put the profiler before the callbacks that wait for the device.
    trainer.callbacks.insert(0, profiler)  # type: ignore[attr-defined]
    trainer.fit(lit_gpt, datamodule=data)
    if not trainer.is_global_zero:
        return
    device = trainer.strategy.root_device
    with gzip.open(profiler.trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    step = step_of(events)
    tokens = cfg.seq_len * cfg.batch_size
    seconds = statistics.median(profiler.milliseconds[2:]) / 1e3
    head = describe("-m scripts.bench.profile_step", cfg.get("commit"))
    head["step"] = (
        f"{tokens} tokens in {trainer.accumulate_grad_batches} micro-batches; {(step.end - step.start) / 1e3:.1f} ms "
        f"profiled, {seconds * 1e3:.1f} ms without the profiler ({tokens / seconds:.0f} tokens/s)"
    )
    if profiler.peak:
        head["memory"] = f"peak {profiler.peak / GIB:.2f} GiB, reserved {profiler.reserved / GIB:.2f} GiB"
    text = report(step, head)
    print(text)
    (folder / "profile.md").write_text(text, encoding="utf-8")
    with (folder / "profile.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("part", "ms", "share", "kernels_ms", "kernels"))
        writer.writerows(table(step))
    inside = [event for event in events if step.start <= event.get("ts", -1) < step.end]
    moments, over_time = memory_over_time(inside, profiler.before, profiler.gradients, device)
    title = f"{cfg.choices.model}, {tokens} tokens, {head['GPU']}"
    draw_memory(moments, over_time, step.start, title).savefig(folder / "memory.png", dpi=150)
    print(f"results: {folder}")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> None:
    with train.errors_in_one_line(train.MISTAKES):
        profile_step(cfg, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    given = {argument.split("=")[0] for argument in sys.argv[1:]}
    sys.argv += [f"{name}={value}" for name, value in DEFAULTS.items() if name not in given]
    with train.errors_in_one_line(train.MISTAKES):
        main()
