"""Compares the planner's predictions with measured peaks (python -m scripts.bench.planner [--only llama_1b]).

Each configuration runs two training steps of train.py's loop, with one document per micro-batch
(scripts/bench/training_case.py). The peak is torch.cuda.max_memory_allocated since the start of training. Writes OUT.md
and OUT.json. To let test_planner.py compare the planner with the measured peaks, save OUT.json as
tests/memory/planner/peaks_<gpu>.json.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_train.memory.offload import Offloaded
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import GIB, predict
from fa_train.models.gpt import GPT
from fa_train.preflight import plan_of
from scripts.bench.command_line import add_results, add_time_limits
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu
from scripts.bench.training_case import Device, StepTimes, memory_gib, training_config
from scripts.bench.training_case import measure as measure_ours

STEPS = 2  # the optimizer has states from the first step on, so the second step has the highest peak


@dataclass(frozen=True)
class Run:
    """One configuration to measure: values of train.py's config keys, and the number of micro-batches per step.

    gemma: whether the model has the norms and the activation of Gemma 2 and 3.
    """

    model: str
    tokens: int
    checkpointing: str = "none"
    offload: Offloaded = False
    mlp_chunk: int | None = None
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    compiled: bool = False
    micro_batches: int = 1
    gemma: bool = False


GEMMA = (
    "model.norm=offset_rmsnorm",
    "model.activation=geglu",
    "model.family={_target_: fa_train.models.config.Family, post_norms: true}",
)
RUNS = [
    Run("gpt2", 8192),
    Run("gpt2", 32768),
    Run("gpt2", 65536, mlp_chunk=16384),
    Run("gpt2", 65536, "selective"),
    Run("gpt2", 131072, "selective", offload=True, mlp_chunk=16384),
    Run("gpt2", 131072, "full", mlp_chunk=16384),
    Run("gpt2_medium", 8192, micro_batches=2),
    Run("gpt2_medium", 32768, offload=True),
    Run("gpt2_medium", 65536, "selective", mlp_chunk=16384),
    Run("gpt2_medium", 65536, "full", offload=True, precision="bf16-true"),
    Run("llama_1b", 8192, micro_batches=2),
    Run("llama_1b", 8192, "full"),
    Run("llama_1b", 32768),
    Run("llama_1b", 32768, "selective", mlp_chunk=16384, micro_batches=2),
    Run("llama_1b", 32768, "selective", precision="bf16-true"),
    Run("llama_1b", 65536, "selective"),
    Run("llama_1b", 65536, "selective", offload=True, mlp_chunk=16384, precision="bf16-true"),
    Run("llama_1b", 131072, "selective", offload=True, mlp_chunk=16384),
    Run("gpt2", 32768, compiled=True),
    Run("llama_1b", 8192, compiled=True),
    Run("llama_1b", 32768, compiled=True),
    Run("llama_1b", 32768, "selective", compiled=True),
    Run("llama_1b", 65536, "full", compiled=True),
    Run("llama_1b", 65536, "selective", offload=True, mlp_chunk=16384, compiled=True),
    Run("llama_1b", 131072, "selective", offload=True, mlp_chunk=16384, precision="bf16-true", compiled=True),
    Run("llama_1b", 65536, "full", offload=True, precision="bf16-true", compiled=True),
    Run("gpt2", 131072, "selective", mlp_chunk=16384, compiled=True),
    Run("llama_1b", 8192, "selective", optimizer="adamw_8bit"),
    Run("llama_1b", 8192, "selective", precision="bf16-true", optimizer="adamw_bf16"),
    Run("llama_1b", 8192, "selective", optimizer="adamw_offload"),
    Run("llama_1b", 131072, "full"),
    Run("llama_1b", 32768, compiled=True, gemma=True),
    Run("llama_1b", 65536, "selective", compiled=True, gemma=True),
    Run("llama_1b", 65536, "full", compiled=True, gemma=True),
    Run("llama_1b", 65536, "selective", precision="bf16-true", compiled=True, gemma=True),
    Run("llama_1b", 8192, compiled=True, gemma=True),
    Run("llama_1b", 32768, gemma=True),
    Run("llama_1b", 65536, "selective", offload=True, mlp_chunk=16384, compiled=True, gemma=True),
]


def configuration(run: Run, device: Device) -> DictConfig:
    """Composes conf/train.yaml for this configuration, as train.py does."""
    chosen = [
        f"memory.checkpointing={run.checkpointing}",
        f"memory.offload={run.offload}",
        f"memory.mlp_chunk={'null' if run.mlp_chunk is None else run.mlp_chunk}",
        f"trainer.precision={run.precision}",
        f"optimizer={run.optimizer}",
        f"lit_gpt.compile_model={run.compiled}",
        f"batch_size={run.micro_batches}",
        *(GEMMA if run.gemma else ()),
    ]
    attention = "flash" if device == "cuda" else "sdpa"
    return training_config(run.model, attention, run.tokens, STEPS, device, chosen)


def measure(run: Run, device: Device) -> tuple[Plan, float, float]:
    """Returns the memory plan of a run, its measured peak in GiB, and the seconds of its second step."""
    config = configuration(run, device)
    with torch.device("meta"):
        model: GPT = instantiate(config.model)
    plan = plan_of(config, model, instantiate(config.optimizer), world_size=1)
    times = StepTimes(1, warmup=STEPS - 1)
    torch._dynamo.reset()  # frees the compiled code of earlier runs; `measure_ours` frees the weights of each run
    measure_ours(config, torch.device(device), times)
    return plan, memory_gib(torch.device(device))[0], times.milliseconds[0] / 1e3


def table(rows: list[dict[str, Any]], head: dict[str, str]) -> str:
    """Formats the predicted and measured peaks as Markdown."""
    lines = header("Predicted and measured peaks", head)
    errors = [abs(row["predicted_gib"] / row["peak_gib"] - 1) for row in rows]
    lines += [f"{sum(error <= 0.05 for error in errors)} of {len(rows)} within 5%, the worst {max(errors):.1%}.", ""]
    names = list(asdict(RUNS[0]))
    lines += [f"| {' | '.join(names)} | predicted GiB | measured GiB | error | s |", "|:--" * (len(names) + 4) + "|"]
    for row in rows:
        cells = [
            "" if value in (None, False) else "yes" if value is True else str(value) for value in row["run"].values()
        ]
        predicted, peak = row["predicted_gib"], row["peak_gib"]
        cells += [f"{predicted:.2f}", f"{peak:.2f}", f"{predicted / peak - 1:+.1%}", f"{row['step_s']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="run configurations whose text contains this, such as llama_1b or compiled=True"
    )
    add_time_limits(parser, budget=True)
    add_results(parser, "scripts/results/planner_<gpu>_<yyyymm>")
    args = parser.parse_args()
    require_gpu("scripts.bench.planner")
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    out = results_prefix(args.out, "planner")
    head = describe("-m scripts.bench.planner", args.commit)
    for run in RUNS:
        if args.only not in repr(run) or time.monotonic() - begin > args.budget:
            continue
        plan, peak, seconds = measure(run, "cuda")
        predicted = predict(plan).allocated / GIB
        rows.append(
            {
                "run": asdict(run),
                "peak_gib": round(peak, 3),
                "predicted_gib": round(predicted, 3),
                "step_s": round(seconds, 2),
                "plan": asdict(plan),
            }
        )
        print(f"{run}: {predicted:.2f} GiB predicted, {peak:.2f} measured, {predicted / peak - 1:+.1%}", flush=True)
        Path(f"{out}.json").write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
        Path(f"{out}.md").write_text(table(rows, head), encoding="utf-8")


if __name__ == "__main__":
    main()
