"""Compares the planner's predictions with measured peaks.

    python -m scripts.bench.planner                           # the configurations in RUNS.
    python -m scripts.bench.planner --only model=llama_1b     # those of llama_1b.
    python -m scripts.bench.planner --random 40 --first 100   # 40 random configurations (random_plans.py).

Each configuration runs two training steps of train.py's loop, by default with one document per micro-batch
(scripts/bench/training_case.py). The peak is torch.cuda.max_memory_allocated since the start of training.
Configurations that train.py refuses, or that would need too much memory, are skipped. Writes OUT.md and OUT.json. To
let test_planner.py compare the planner with the measured peaks, save OUT.json as tests/memory/planner/peaks_<gpu>.json.
"""

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_train.errors import explain
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import GIB, predict
from fa_train.preflight import plan_of
from fa_train.training import build_model
from scripts.bench.command_line import add_results, add_time_limits
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.random_plans import overrides_of
from scripts.bench.timing import require_gpu
from scripts.bench.training_case import Device, StepTimes, memory_gib, training_config
from scripts.bench.training_case import measure as measure_ours

STEPS = 2  # the optimizer has states from the first step on, so the second step has the highest peak
LARGEST_HOST = 32.0  # GiB of host memory that a configuration may need; those in RUNS need at most 18.7


@dataclass(frozen=True)
class Configuration:
    """One configuration to measure: a model in conf/model, the tokens of a row, and overrides of train.py."""

    model: str
    seq_len: int
    overrides: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((f"model={self.model}", f"seq_len={self.seq_len}", *self.overrides))


COMPILED = "lit_gpt.compile_model=true"
GEMMA = (  # the norms and the activation of Gemma 2 and 3
    "model.norm=offset_rmsnorm",
    "model.activation=geglu",
    "model.family={_target_: fa_train.models.config.Family, post_norms: true}",
)
RUNS = [
    Configuration(model, seq_len, ("lit_gpt.compile_model=false", *overrides))
    for model, seq_len, *overrides in (
        ("gpt2", 8192),
        ("gpt2", 32768),
        ("gpt2", 65536, "memory.mlp_chunk=16384"),
        ("gpt2", 65536, "memory=selective"),
        ("gpt2", 131072, "memory=offload"),
        ("gpt2", 131072, "memory=full", "memory.mlp_chunk=16384"),
        ("gpt2_medium", 8192, "batch_size=2"),
        ("gpt2_medium", 32768, "memory.offload=true"),
        ("gpt2_medium", 65536, "memory=selective", "memory.mlp_chunk=16384"),
        ("gpt2_medium", 65536, "memory=full", "memory.offload=true", "trainer.precision=bf16-true"),
        ("llama_1b", 8192, "batch_size=2"),
        ("llama_1b", 8192, "memory=full"),
        ("llama_1b", 32768),
        ("llama_1b", 32768, "memory=selective", "memory.mlp_chunk=16384", "batch_size=2"),
        ("llama_1b", 32768, "memory=selective", "trainer.precision=bf16-true"),
        ("llama_1b", 65536, "memory=selective"),
        ("llama_1b", 65536, "memory=offload", "trainer.precision=bf16-true"),
        ("llama_1b", 131072, "memory=offload"),
        ("gpt2", 32768, COMPILED),
        ("llama_1b", 8192, COMPILED),
        ("llama_1b", 32768, COMPILED),
        ("llama_1b", 32768, "memory=selective", COMPILED),
        ("llama_1b", 65536, "memory=full", COMPILED),
        ("llama_1b", 65536, "memory=offload", COMPILED),
        ("llama_1b", 131072, "memory=offload", "trainer.precision=bf16-true", COMPILED),
        ("llama_1b", 65536, "memory=full", "memory.offload=true", "trainer.precision=bf16-true", COMPILED),
        ("gpt2", 131072, "memory=selective", "memory.mlp_chunk=16384", COMPILED),
        ("llama_1b", 8192, "memory=selective", "optimizer=adamw_8bit"),
        ("llama_1b", 8192, "memory=selective", "trainer.precision=bf16-true", "optimizer=adamw_bf16"),
        ("llama_1b", 8192, "memory=selective", "optimizer=adamw_offload"),
        ("llama_1b", 131072, "memory=full"),
        ("llama_1b", 32768, COMPILED, *GEMMA),
        ("llama_1b", 65536, "memory=selective", COMPILED, *GEMMA),
        ("llama_1b", 65536, "memory=full", COMPILED, *GEMMA),
        ("llama_1b", 65536, "memory=selective", "trainer.precision=bf16-true", COMPILED, *GEMMA),
        ("llama_1b", 8192, COMPILED, *GEMMA),
        ("llama_1b", 32768, *GEMMA),
        ("llama_1b", 65536, "memory=offload", COMPILED, *GEMMA),
    )
]


def random_configuration(number: int) -> Configuration:
    """Returns a random configuration. `number` is the seed of the random choices."""
    seq_len, overrides = overrides_of(number)
    return Configuration("llama_1b", seq_len, tuple(overrides))


def planned(configuration: Configuration, device: Device) -> tuple[DictConfig, Plan]:
    """Returns the config of train.py and the memory plan. Raises the same errors as train.py."""
    config = training_config(
        configuration.model, "flash", configuration.seq_len, STEPS, device, configuration.overrides
    )
    with torch.device("meta"):
        model = build_model(config, config.model.vocab_size)
    return config, plan_of(config, model, instantiate(config.optimizer), world_size=1)


def measure(config: DictConfig, device: Device) -> tuple[float, float]:
    """Trains for two steps. Returns the peak memory in GiB, and the seconds of the second step."""
    torch._dynamo.reset()  # frees the compiled code of earlier configurations
    gc.collect()
    times = StepTimes(1, warmup=STEPS - 1)
    measure_ours(config, torch.device(device), times)
    return memory_gib(torch.device(device))[0], times.milliseconds[0] / 1e3


def table(rows: list[dict[str, Any]], head: dict[str, str]) -> str:
    """Formats the predicted and measured peaks as Markdown, the largest errors first."""
    errors = {row["number"]: row["predicted_gib"] / row["peak_gib"] - 1 for row in rows}
    rows = sorted(rows, key=lambda row: -abs(errors[row["number"]]))
    within, worst = sum(abs(error) <= 0.05 for error in errors.values()), abs(errors[rows[0]["number"]])
    lines = header("Predicted and measured peaks", head)
    lines += [f"{within} of {len(rows)} within 5%, the worst {worst:.1%}.", ""]
    lines += ["| number | predicted GiB | measured GiB | error | s | configuration |", "|--:" * 5 + "|:--|"]
    for row in rows:
        peaks = f"{row['predicted_gib']:.2f} | {row['peak_gib']:.2f} | {errors[row['number']]:+.1%}"
        lines.append(f"| {row['number']} | {peaks} | {row['step_s']:.2f} | `{row['configuration']}` |")
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="run configurations whose text contains this, such as compile_model=true"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="COUNT", help="draw this many random configurations instead of RUNS"
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first random configuration")
    parser.add_argument(
        "--largest",
        type=float,
        default=64.0,
        help="skip configurations that need more GiB on the GPU; those in RUNS need at most 59.5",
    )
    add_time_limits(parser, budget=True)
    add_results(parser, "scripts/results/planner_<gpu>_<yyyymm>, or planner_random_<gpu>_<yyyymm>")
    args = parser.parse_args()
    if args.random < 0:
        parser.error(f"--random must not be negative; got {args.random}")
    if args.first and not args.random:
        parser.error(f"--first needs --random; got --first {args.first} alone")
    return args


def main() -> None:
    args = parse_arguments()
    require_gpu("scripts.bench.planner")
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    out = results_prefix(args.out, "planner_random" if args.random else "planner")
    head = describe("-m scripts.bench.planner", args.commit)
    drawn = {number: random_configuration(number) for number in range(args.first, args.first + args.random)}
    for number, configuration in (drawn or dict(enumerate(RUNS))).items():
        if args.only not in configuration.text or time.monotonic() - begin > args.budget:
            continue
        try:
            config, plan = planned(configuration, "cuda")
        except (ValueError, HydraException) as error:
            print(f"{number}: refused, {explain(error)}", flush=True)
            continue
        prediction = predict(plan)
        predicted, on_host = prediction.allocated / GIB, prediction.host / GIB
        if predicted > args.largest or on_host > LARGEST_HOST:
            print(f"{number}: skipped, {predicted:.1f} GiB on the GPU and {on_host:.1f} GiB on the host", flush=True)
            continue
        peak, seconds = measure(config, "cuda")
        rows.append(
            {
                "number": number,
                "configuration": configuration.text,
                "peak_gib": round(peak, 3),
                "predicted_gib": round(predicted, 3),
                "step_s": round(seconds, 2),
                "plan": asdict(plan),
            }
        )
        print(f"{number}: {predicted:.2f} GiB predicted, {peak:.2f} measured, {predicted / peak - 1:+.1%}", flush=True)
        lines = (f"  {json.dumps(row, default=list)}" for row in rows)
        Path(f"{out}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
        Path(f"{out}.md").write_text(table(rows, head), encoding="utf-8")
    if not rows:
        sys.exit("error: no configuration was measured")


if __name__ == "__main__":
    main()
