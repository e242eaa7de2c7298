"""Compares predicted and measured peaks of random configurations (python -m scripts.bench.random_plans).

A configuration is a random combination of a model, memory levers, a precision, an optimizer and an adapter. The
configuration's number is the seed of the random choices. Each configuration runs two training steps of train.py's loop,
as in scripts/bench/planner.py. Configurations that train.py refuses, or that would need too much memory, are skipped.
Writes OUT.md and OUT.json.
"""

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import GIB, predict
from fa_train.preflight import plan_of
from fa_train.training import build_model
from scripts.bench.command_line import add_results, add_time_limits
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu
from scripts.bench.training_case import Device, StepTimes, memory_gib, training_config
from scripts.bench.training_case import measure as measure_ours

STEPS = 2  # the optimizer has states from the first step on, so the second step has the highest peak
LARGEST_HOST = 15.0  # GiB of host memory that a configuration may need
OPTIMIZERS = {
    "bf16-mixed": ("adamw", "adamw_8bit", "adamw_offload"),
    "bf16-true": ("adamw", "adamw_bf16", "adamw_master", "adamw_8bit"),
    "32-true": ("adamw",),
}
SOME_LAYERS = "[q_proj,v_proj]"  # peft's default for Llama


def overrides_of(number: int) -> tuple[int, list[str]]:
    """Returns the seq_len of a configuration, and the overrides of train.py for all other settings."""
    draw = random.Random(number)
    has_adapter = draw.random() < 0.35
    model = _model_of(draw, has_adapter)
    rows = draw.choice((1, 1, 1, 2))
    seq_len = draw.choice((4096, 8192, 12345, 16384, 32768, 40000, 65536, 98304)) // rows
    precision = draw.choice(("bf16-mixed", "bf16-mixed", "bf16-true", "bf16-true", "32-true"))
    checkpointing = draw.choice(("none", "none", "selective", "selective", "full"))
    settings = model | {
        "data.micro_batch_size": rows,
        "data.document_len": draw.choice((seq_len, seq_len, 777, 4000)),
        "batch_size": rows * draw.choice((1, 1, 2, 3)),
        "trainer.precision": precision,
        "optimizer": draw.choice(("adamw", "adamw_8bit") if has_adapter else OPTIMIZERS[precision]),
        "adapter": draw.choice(("lora", "qlora")) if has_adapter else "none",
        "memory.checkpointing": checkpointing,
        "memory.offload": draw.choice(("false", "false", "true", "all" if checkpointing == "none" else "true")),
        "memory.mlp_chunk": draw.choice(("null", "null", 4096, 16384)),
        "memory.loss.chunk_size": draw.choice((1024, 4096, 4096, 16384)),
        "lit_gpt.compile_model": draw.choice(("true", "true", "false")),
    }
    if has_adapter:
        settings["adapter.r"] = draw.choice((8, 16, 64))
        settings["adapter.target_modules"] = draw.choice(("all-linear", "all-linear", SOME_LAYERS))
    if settings["model.positions"] == "learned":
        settings["model.max_seq_len"] = seq_len
    return seq_len, [f"{key}={value}" for key, value in settings.items()]


def _model_of(draw: random.Random, has_adapter: bool) -> dict[str, Any]:
    """Draws a model. Models with adapters have the architecture of Llama, because adapters must be exportable."""
    head_dim = draw.choice((64, 64, 64, 128, 128, 128, 96, 80, 256, 192))
    dim = draw.choice((768, 1024, 1536, 2048, 3072, 4096))
    n_heads = max(1, round(dim / head_dim * draw.choice((1, 1, 1, 0.5, 1.25))))
    if has_adapter:  # train.py refuses other models, because transformers cannot read them as a Llama
        n_heads = next(fewer for fewer in range(n_heads, 0, -1) if dim % fewer == 0)
    layers = draw.choice((2, 3, 5, 8, 12) if dim <= 2048 else (2, 3, 5))
    family = {
        "post_norms": draw.choice(("true", "false", "false")),
        "softcap": draw.choice((50.0, 0.0, 0.0)),
        "logit_softcap": draw.choice((30.0, 0.0, 0.0)),
        "windows": draw.choice((str(["1024" if i % 2 else "null" for i in range(layers)]).replace("'", ""), "null")),
    }
    chosen: dict[str, Any] = {
        "norm": draw.choice(("rmsnorm", "rmsnorm", "layernorm", "offset_rmsnorm")),
        "activation": draw.choice(("swiglu", "swiglu", "gelu", "geglu")),
        "positions": draw.choice(("rope", "rope", "rope", "learned", "none")),
        "bias": draw.choice(("false", "false", "true")),
        "qk_norm": draw.choice(("false", "false", "true")),
        "family": f"{{_target_: fa_train.models.config.Family, {', '.join(f'{k}: {v}' for k, v in family.items())}}}",
    }
    if has_adapter:
        chosen = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": "false", "qk_norm": "false"}
    chosen |= {
        "dim": dim,
        "n_layers": layers,
        "n_heads": n_heads,
        "n_kv_heads": draw.choice([k for k in (1, 2, 4, 8, n_heads) if n_heads % k == 0]),
        "head_dim": head_dim,
        "ffn_dim": int(dim * draw.choice((2, 2.6875, 3.5, 4))) // 64 * 64,
        "vocab_size": draw.choice((1024, 1024, 16000, 50257, 128256)),
        "tied": draw.choice(("true", "false")),
    }
    return {f"model.{key}": value for key, value in chosen.items()}


def planned(number: int, device: Device) -> tuple[DictConfig, Plan]:
    """Returns the config and the memory plan of a configuration. Raises the same errors as train.py."""
    seq_len, overrides = overrides_of(number)
    config = training_config("llama_1b", "flash", seq_len, STEPS, device, overrides)
    with torch.device("meta"):
        model = build_model(config, config.model.vocab_size)
    return config, plan_of(config, model, instantiate(config.optimizer), world_size=1)


def measured(config: DictConfig, device: Device) -> float:
    """Returns the peak memory of a configuration's training steps in GiB."""
    torch._dynamo.reset()  # frees the compiled code of earlier configurations
    gc.collect()
    measure_ours(config, torch.device(device), StepTimes(1, warmup=STEPS - 1))
    return memory_gib(torch.device(device))[0]


def table(rows: list[dict[str, Any]], head: dict[str, str]) -> str:
    """Formats the predicted and measured peaks as Markdown, the largest errors first."""
    rows = sorted(rows, key=lambda row: -abs(row["predicted_gib"] / row["peak_gib"] - 1))
    errors = [row["predicted_gib"] / row["peak_gib"] - 1 for row in rows]
    lines = header("Predicted and measured peaks of random configurations", head)
    lines += [f"{sum(abs(error) <= 0.05 for error in errors)} of {len(rows)} within 5%.", ""]
    lines += ["| number | predicted GiB | measured GiB | error | seq_len | overrides |", "|--:" * 5 + "|:--|"]
    for row, error in zip(rows, errors, strict=True):
        cells = row["number"], f"{row['predicted_gib']:.2f}", f"{row['peak_gib']:.2f}", f"{error:+.1%}"
        lines.append(f"| {' | '.join(map(str, cells))} | {row['seq_len']} | `{row['overrides']}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the number of the first configuration")
    parser.add_argument("--count", type=int, default=40, help="how many configurations to draw")
    parser.add_argument("--largest", type=float, default=40.0, help="skip configurations with a larger plan, in GiB")
    add_time_limits(parser, budget=True)
    add_results(parser, "scripts/results/random_plans_<gpu>_<yyyymm>")
    args = parser.parse_args()
    require_gpu("scripts.bench.random_plans")
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    out = results_prefix(args.out, "random_plans")
    head = describe("-m scripts.bench.random_plans", args.commit)
    for number in range(args.first, args.first + args.count):
        if time.monotonic() - begin > args.budget:
            break
        try:
            config, plan = planned(number, "cuda")
        except (ValueError, HydraException) as error:
            print(f"{number}: refused, {error}", flush=True)
            continue
        prediction = predict(plan)
        if prediction.allocated > args.largest * GIB or prediction.host > LARGEST_HOST * GIB:
            print(f"{number}: skipped, {prediction.allocated / GIB:.1f} GiB", flush=True)
            continue
        row = {"number": number, "seq_len": plan.run.seq_len, "overrides": " ".join(overrides_of(number)[1])}
        row |= {"predicted_gib": round(prediction.allocated / GIB, 3), "peak_gib": round(measured(config, "cuda"), 3)}
        rows.append(row)
        print(f"{number}: {row['predicted_gib']:.2f} GiB predicted, {row['peak_gib']:.2f} measured", flush=True)
        Path(f"{out}.json").write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
        Path(f"{out}.md").write_text(table(rows, head), encoding="utf-8")


if __name__ == "__main__":
    main()
