"""What attention costs a training step: peak memory, tokens/s and MFU of one model over attention x seq_len.

    python -m scripts.ablate_memory                                        # gpt2 on a GPU, nano on a CPU
    python -m scripts.ablate_memory --model llama_1b --seq-lens 1024 4096 16384 --out runs/ablate_memory/llama
    python -m scripts.ablate_memory --attentions naive flash memory=full model.n_layers=6 --no-wandb

A case is forward, backward and optimizer step on one synthetic document of seq_len tokens, in a process of its own:
one that runs out of memory or crashes is a result. A case is skipped where a shorter one of its attention ran out of
memory. OUT/results.jsonl holds what is finished; the same command continues after an interruption and tries failed
cases again. Writes OUT/ablation.csv, .md, .png and .html, and to Weights & Biases a run for each measured case and one
summary, in one group.

Peak and reserved are the CUDA allocator's; on a CPU peak is the process's, libraries included. Step time is the
median. FLOPs and MFU are as fa_train/flops.py counts them: causal, nothing for recomputation.

Predicted least memory of naive attention, with AdamW in fp32:
    16 * parameters + layers * n_heads * b * N^2 bytes
16 is for weight, gradient and two moments. b is what autograd keeps of one score: the softmax's output in fp32, 4
bytes, and with bf16 its copy for P V, 2 more. Checkpointing `full` keeps one layer's at a time. Everything else
(hidden states, logits, masks, what the backward adds) comes on top, so naive must fail where this exceeds the device.
"""

import argparse
import base64
import csv
import json
import os
import platform
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import date
from html import escape
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fa_train.callbacks import is_out_of_memory
from fa_train.flops import peak_flops, train_flops
from fa_train.models.attention import require_backend
from fa_train.models.gpt import GPT
from scripts.bench_attention import describe

REPOSITORY = Path(__file__).parents[1]
CONF = REPOSITORY / "conf"
GIB = 2**30
WARMUP = 2  # steps: the first allocates the optimizer's state and compiles kernels
VOCABULARIES = {"nano": 259}  # where conf leaves it to the tokenizer: bytes and three marks
GPT2_VOCABULARY = 50257
STYLES = {  # the palette of Okabe and Ito, and a marker each, so that no reader needs the colours
    "naive": ("#000000", "o"),
    "chunked": ("#009E73", "D"),
    "sdpa": ("#E69F00", "s"),
    "flash": ("#D55E00", "P"),
}
PANELS = (("peak_gib", "peak memory (GiB)"), ("tokens_per_s", "tokens/s"), ("mfu", "MFU"))
Device = Literal["cuda", "cpu"]
Precision = Literal["bf16-mixed", "32-true"]


@dataclass(frozen=True)
class Case:
    model: str
    attention: str
    seq_len: int  # tokens, one document
    device: Device
    precision: Precision
    steps: int  # timed ones
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model} {self.attention} {self.seq_len}"


@dataclass(frozen=True)
class Result:
    """Numbers are None where they are unknown: all but memory unless outcome is "ok", mfu without a known peak."""

    attention: str
    seq_len: int
    outcome: str  # "ok", "oom", "failed: REASON" or "skipped: REASON"
    peak_gib: float | None = None
    reserved_gib: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None

    @property
    def oom(self) -> bool:
        return self.outcome == "oom"


@dataclass(frozen=True)
class Prediction:
    """The least memory that naive attention takes, in bytes."""

    state: int  # weights, gradients and moments
    per_pair: int  # of one query and one key, over all heads and the layers kept

    def peak(self, seq_len: float) -> float:
        return self.state + self.per_pair * seq_len**2

    def fails_at(self, capacity: int) -> int:
        """The shortest sequence, in tokens, that does not fit into `capacity` bytes."""
        return int((max(0, capacity - self.state) / self.per_pair) ** 0.5) + 1


def configuration(case: Case) -> DictConfig:
    """conf's model, attention, memory and optimizer; an override may choose another of the latter two."""
    groups = {"model": case.model, "attention": case.attention, "memory": "default", "optimizer": "adamw"}
    values = []
    for override in case.overrides:
        name, _, value = override.partition("=")
        if name in ("memory", "optimizer"):
            groups[name] = value
        else:
            values.append(override)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[*(f"+{name}={value}" for name, value in groups.items()), *values])
    if config.model.vocab_size is None:
        config.model.vocab_size = VOCABULARIES.get(case.model, GPT2_VOCABULARY)
    return config


def predict(case: Case) -> Prediction:
    """From the model's sizes; no weights are allocated."""
    config = configuration(case)
    with torch.device("meta"):
        model: GPT = instantiate(config.model)
    layers = 1 if config.memory.checkpointing == "full" else model.n_layers
    score_bytes = 4 if case.precision == "32-true" else 4 + 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Prediction(16 * parameters, layers * model.n_heads * score_bytes)


def measure(case: Case) -> Result:
    """Runs the case in this process. Errors other than running out of memory are raised."""
    try:
        step_ms, flops = time_steps(case)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Result(case.attention, case.seq_len, "oom", *memory_gib(case.device))
    flops_per_s = flops / step_ms * 1e3
    name = torch.cuda.get_device_name() if case.device == "cuda" else ""
    peak = peak_flops(name, torch.bfloat16 if case.precision == "bf16-mixed" else torch.float32)
    return Result(
        case.attention,
        case.seq_len,
        "ok",
        *memory_gib(case.device),
        step_ms=step_ms,
        tokens_per_s=case.seq_len / step_ms * 1e3,
        tflops=flops_per_s * 1e-12,
        mfu=flops_per_s / peak if peak else None,
    )


def time_steps(case: Case) -> tuple[float, float]:
    """The median milliseconds of one step, and its model FLOPs."""
    torch.manual_seed(0)
    config, device = configuration(case), torch.device(case.device)
    require_backend(instantiate(config.attention), device)
    with device:
        model: GPT = instantiate(config.model)
        tokens = torch.randint(model.vocab_size, (case.seq_len + 1,))
    optimizer = instantiate(config.optimizer)(model)
    mixed = case.precision == "bf16-mixed"
    milliseconds = []
    for _ in range(WARMUP + case.steps):
        start = time.perf_counter()
        with torch.autocast(case.device, torch.bfloat16) if mixed else nullcontext():
            loss = model(tokens[:-1], labels=tokens[1:]) / case.seq_len
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if case.device == "cuda":
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return statistics.median(milliseconds[WARMUP:]), train_flops(model, case.seq_len, float(case.seq_len) ** 2)


def memory_gib(device: Device) -> tuple[float, float | None]:
    """Peak and reserved; a process has no reserve."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss begins with the memory of the process that started this one
        [line] = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / GIB, None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, None


def capacity(device: Device) -> int:
    """Bytes that a case can have at most."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return installed if limit == resource.RLIM_INFINITY else min(installed, limit)


def run_apart(case: Case, timeout: float) -> Result:
    """The case in a process of its own, to its end, for at most `timeout` seconds."""
    command = [sys.executable, "-m", "scripts.ablate_memory", "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Result(case.attention, case.seq_len, f"failed: not done after {timeout:g} s")
    if done.returncode == -signal.SIGKILL:  # how Linux ends a process when the host's memory is out
        return Result(case.attention, case.seq_len, "oom")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Result(case.attention, case.seq_len, f"failed: {reason}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def load(path: Path) -> dict[Case, Result]:
    """What results.jsonl has, a line a case."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {case_of(line["case"]): Result(**line["result"]) for line in lines}


def case_of(settings: dict[str, Any]) -> Case:
    return Case(**settings | {"overrides": tuple(settings["overrides"])})


def save(results: dict[Case, Result], path: Path) -> None:
    """Replaces the file whole, so that an interruption leaves no half a line."""
    new = path.with_suffix(".new")
    lines = [json.dumps({"case": asdict(case), "result": asdict(result)}) for case, result in results.items()]
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


def sweep(
    cases: list[Case], path: Path, run: Callable[[Case], Result], report: Callable[[Case, Result], None]
) -> list[Result]:
    """All cases' results, in order; those that `path` has as ok or oom are not run again.

    `report` is told of every case that ran. Cases of one attention must come shortest first.
    """
    finished = load(path)
    out_of_memory: dict[str, int] = {}  # by attention, the shortest length
    results = []
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*bar) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.attention} {case.seq_len}")
            result = finished.get(case)
            if case.attention in out_of_memory:
                reason = f"skipped: {out_of_memory[case.attention]} ran out of memory"
                result = Result(case.attention, case.seq_len, reason)
            elif result is None or result.outcome not in ("ok", "oom"):
                result = finished[case] = run(case)
                save(finished, path)
                report(case, result)
            if result.oom:
                out_of_memory[case.attention] = case.seq_len
            results.append(result)
            progress.advance(task)
    return results


def header() -> list[str]:
    return [*(field.name for field in fields(Result)), "oom"]


def cells(result: Result) -> list[str | int | float | None]:
    """In header()'s order."""
    return [*asdict(result).values(), int(result.oom)]


def write_csv(results: list[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header())
        writer.writerows(cells(result) for result in results)


def shown(value: str | float | None) -> str:
    """A cell of the tables that people read."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def explain(prediction: Prediction, device_bytes: int) -> str:
    """The formula with this model's numbers, and where naive must fail."""
    return (
        f"Naive attention needs at least {prediction.state / GIB:.3g} GiB + {prediction.per_pair} N^2 bytes "
        f"and must fail from N = {prediction.fails_at(device_bytes)} tokens on this device of "
        f"{device_bytes / GIB:.1f} GiB."
    )


def markdown(results: list[Result], head: dict[str, str], prediction: str) -> str:
    rows = [[shown(value) for value in cells(result)] for result in results]
    table = [header(), ["---"] * len(header()), *rows]
    lines = ["# Attention in a training step: memory and speed", ""]
    lines += [*(f"- {key}: `{value}`" for key, value in head.items()), "", prediction, ""]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    return "\n".join(lines) + "\n"


def page(results: list[Result], head: dict[str, str], prediction: str, picture: bytes) -> str:
    """One HTML file that asks nothing of any other."""
    facts = "".join(f"<li>{escape(key)}: <code>{escape(value)}</code></li>" for key, value in head.items())
    names = "".join(f"<th>{escape(name)}</th>" for name in header())
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(shown(value))}</td>' for value in cells(result))}</tr>\n" for result in results
    )
    image = base64.b64encode(picture).decode()
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Attention in a training step</title>
<link rel="icon" href="data:,">
<style>body {{ font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
img {{ max-width: 100% }} td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }}
table {{ border-collapse: collapse }}</style></head>
<body><h1>Attention in a training step: memory and speed</h1>
<ul>{facts}</ul>
<p>{escape(prediction)}</p>
<img alt="Memory, tokens/s and MFU against sequence length" src="data:image/png;base64,{image}">
<table><thead><tr>{names}</tr></thead>
<tbody>
{rows}</tbody></table></body></html>
"""


def draw(results: list[Result], prediction: Prediction, device_bytes: int, title: str) -> Figure:
    """Memory, tokens/s and MFU against length, both axes logarithmic."""
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, len(PANELS)))
    for panel, (quantity, label) in zip(axes, PANELS, strict=True):
        _draw_panel(panel, results, quantity)
        panel.set_ylabel(label)
    seq_lens = sorted({result.seq_len for result in results})
    naive = [seq_len for seq_len in seq_lens if prediction.peak(seq_len) < 4 * device_bytes]  # far beyond says nothing
    axes[0].plot(naive, [prediction.peak(n) / GIB for n in naive], "k:", label="naive, predicted least")
    axes[0].axhline(device_bytes / GIB, color="#888888", linestyle="--", label="the device's memory")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure


def _draw_panel(axes: Axes, results: list[Result], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.2)  # room for the marks of running out of memory
    above = axes.get_xaxis_transform()  # x in tokens, y in shares of the panel's height
    for attention in dict.fromkeys(result.attention for result in results):
        color, marker = STYLES.get(attention, ("#0072B2", "X"))
        mine = [result for result in results if result.attention == attention]
        done = [result for result in mine if result.outcome == "ok" and getattr(result, quantity) is not None]
        values = [getattr(result, quantity) for result in done]
        axes.plot([result.seq_len for result in done], values, color=color, marker=marker, label=attention)
        for result in (result for result in mine if result.oom):
            axes.plot([result.seq_len], [0.9], color=color, marker=marker, fillstyle="none", transform=above)
            axes.text(result.seq_len, 0.93, "OOM", color=color, ha="center", va="bottom", transform=above)
    if not any(getattr(result, quantity) for result in results):
        axes.text(0.5, 0.5, "unknown on this device", ha="center", transform=axes.transAxes)
    seq_lens = sorted({result.seq_len for result in results})
    axes.set_xticks(seq_lens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in seq_lens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("sequence length (tokens)")
    axes.grid(True, color="#dddddd", linewidth=0.6)


class Records:
    """Runs on Weights & Biases, all of one group, a case or the summary each; with mode None there are none."""

    def __init__(self, mode: str | None, project: str, group: str, folder: Path) -> None:
        self.mode, self.project, self.group, self.folder = mode, project, group, folder

    def start(self, name: str, job_type: str, tags: list[str], config: dict[str, Any]) -> Any:
        import wandb

        return wandb.init(
            project=self.project, group=self.group, name=name, job_type=job_type, tags=tags, config=config,
            dir=self.folder, mode=cast(Any, self.mode), settings=wandb.Settings(init_timeout=60, silent=True),
        )  # fmt: skip

    def case(self, case: Case, result: Result) -> None:
        if self.mode is None:
            return
        tags = [f"model={case.model}", f"attention={case.attention}", f"seq_len={case.seq_len}"]
        run = self.start(case.name, "case", tags, asdict(case))
        measured = dict(zip(header(), cells(result), strict=True))
        run.log({name: value for name, value in measured.items() if isinstance(value, int | float)})
        run.summary["outcome"] = result.outcome
        run.finish()

    def summary(self, case: Case, results: list[Result], head: dict[str, str], out: Path, device_bytes: int) -> None:
        """The table, the charts, the picture and the page; `case` is any of the sweep's."""
        if self.mode is None:
            return
        import wandb

        config = {name: value for name, value in asdict(case).items() if name not in ("attention", "seq_len")}
        run = self.start(f"{case.model} summary", "summary", [f"model={case.model}", "summary"], config | head)
        logged: dict[str, Any] = {
            "results": wandb.Table(columns=[*header()], data=[cells(result) for result in results]),
            "picture": wandb.Image(f"{out}.png"),
            "page": wandb.Html(Path(f"{out}.html").read_text(encoding="utf-8"), inject=False),
        }
        for quantity, label in PANELS:
            xs, ys, keys = series(results, quantity, device_bytes / GIB if quantity == "peak_gib" else 0.0)
            if keys:
                logged[f"chart/{quantity}"] = wandb.plot.line_series(xs, ys, keys, label, "sequence length (tokens)")
        run.log(logged)
        run.finish()


def series(results: list[Result], quantity: str, oom_at: float) -> tuple[list[list[int]], list[list[float]], list[str]]:
    """Lengths, values and name of each line: one an attention, and one of its points without memory, at `oom_at`."""
    xs, ys, keys = [], [], []
    for attention in dict.fromkeys(result.attention for result in results):
        mine = [result for result in results if result.attention == attention]
        done = [(r.seq_len, getattr(r, quantity)) for r in mine if r.outcome == "ok" and getattr(r, quantity)]
        failed = [(result.seq_len, oom_at) for result in mine if result.oom]
        for name, points in ((attention, done), (f"{attention} OOM", failed)):
            if points:
                xs.append([seq_len for seq_len, _ in points])
                ys.append([value for _, value in points])
                keys.append(name)
    return xs, ys, keys


def described(command: str, commit: str | None) -> dict[str, str]:
    """bench_attention's head, also where there is no GPU to name."""
    if torch.cuda.is_available():
        return describe(command, commit, date.today())
    machine = f"none; CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    with patch.object(torch.cuda, "get_device_name", lambda: machine):
        return describe(command, commit, date.today())


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models, attentions = (sorted(path.stem for path in (CONF / name).glob("*.yaml")) for name in ("model", "attention"))
    lengths = [2**n for n in (range(10, 21) if cuda else range(8, 11))]
    chosen = ["naive", "chunked", "sdpa", "flash"] if cuda else ["naive", "chunked", "sdpa"]
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of model, attention, memory and optimizer")
    parser.add_argument("--model", choices=models, default="gpt2" if cuda else "nano")
    parser.add_argument("--attentions", nargs="+", choices=attentions, default=chosen)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=lengths, help="tokens")
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed" if cuda else "32-true")
    parser.add_argument("--steps", type=int, default=10 if cuda else 3, help="timed steps of a case")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a case may take")
    parser.add_argument("--no-wandb", action="store_true", help="write files only")
    parser.add_argument("--project", default="fa_train", help="on Weights & Biases")
    parser.add_argument("--group", help="on Weights & Biases; ablate_memory and the name of OUT")
    parser.add_argument("--commit", help="for the head of the tables, where the files are a copy without git")
    parser.add_argument("--out", type=Path, help="folder of the results; runs/ablate_memory/<model>_<device>")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name in ("steps", "timeout", "seq_lens"):
        found = getattr(args, name)
        if min(found if isinstance(found, list) else [found]) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {found}")
    if malformed := [override for override in args.overrides if "=" not in override]:
        parser.error(f"overrides must be name=value; got {' '.join(malformed)}")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.case is not None:
        print(json.dumps(asdict(measure(case_of(args.case)))))
        return
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [
        Case(args.model, attention, seq_len, device, args.precision, args.steps, tuple(args.overrides))
        for attention in dict.fromkeys(args.attentions)
        for seq_len in sorted(set(args.seq_lens))
    ]
    try:
        prediction, device_bytes = predict(cases[0]), capacity(device)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    folder: Path = (args.out or REPOSITORY / "runs" / "ablate_memory" / f"{args.model}_{device}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    explanation = explain(prediction, device_bytes)
    print(explanation, flush=True)
    mode = None
    if not args.no_wandb:
        from fa_train.wandb_mode import wandb_mode

        mode = wandb_mode()
    records = Records(mode, args.project, args.group or f"ablate_memory {folder.name}", folder)
    path = folder / "results.jsonl"
    try:
        results = sweep(cases, path, lambda case: run_apart(case, args.timeout), records.case)
    except KeyboardInterrupt:
        print(f"stopped; {path} has what is finished, and the same command continues", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    head = described(shlex.join(["python", "-m", "scripts.ablate_memory", *sys.argv[1:]]), args.commit)
    head["model"] = ", ".join([args.model, args.precision, *args.overrides])
    out = folder / "ablation"
    write_csv(results, Path(f"{out}.csv"))
    Path(f"{out}.md").write_text(markdown(results, head, explanation), encoding="utf-8")
    draw(results, prediction, device_bytes, f"{args.model}, {args.precision}, {head['GPU']}").savefig(f"{out}.png")
    html = page(results, head, explanation, Path(f"{out}.png").read_bytes())
    Path(f"{out}.html").write_text(html, encoding="utf-8")
    records.summary(cases[0], results, head, out, device_bytes)
    print(f"results: {out}.*")


if __name__ == "__main__":
    main()
