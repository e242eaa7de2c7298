"""Measures the cost of attention in two ways: in a whole training step (peak memory, tokens/s, MFU), and alone.

    python -m scripts.ablate_memory                                        # gpt2 on a GPU, nano on a CPU.
    python -m scripts.ablate_memory --model llama_1b --seq-lens 1024 4096 16384 --out runs/ablate_memory/llama  # 1B.
    python -m scripts.ablate_memory --only step --attentions naive flash memory=full model.n_layers=6 --no-wandb
    python -m scripts.ablate_memory --only attention --head-dims 64 128 --dtypes bf16 fp32    # no training step.

The script makes two sweeps over the attention implementation and seq_len. The first sweep measures training steps of
train.py's loop on one synthetic document. On a GPU, the model's blocks are compiled with torch.compile, but chunked
attention runs in eager mode. The second sweep measures attention alone: forward and backward, in eager mode. The second
sweep varies --n-heads, --head-dims and --dtypes one at a time, and keeps the first values of the two other options.
Each case runs in a new process, so a crash or running out of memory affects only that case. A case is skipped if a
shorter case with the same settings ran out of memory. The script first prints the minimum memory that naive attention
needs, and the shortest seq_len for which this minimum exceeds the memory of the device (see
scripts/ablation/formula.py).

OUT/results.jsonl holds the finished cases. To continue after Ctrl-C, or to repeat failed cases, run the same command
again on the same kind of GPU. The script writes ablation.csv and attention.csv, the computed minimum memory in
*_formula.csv, a PNG for each sweep, ablation.md and ablation.html. On Weights & Biases, all cases form one group, with
one run for each case and one summary run. OUT/cases.log holds what the cases print.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.config_options import options
from fa_train.errors import errors_in_one_line
from scripts.ablation.cases import DTYPES, AttentionCase, Case, Device, Result, StepCase, capacity, measure
from scripts.ablation.formula import Formula, attention_formula, step_formula
from scripts.ablation.report import Records, attention_part, step_part, write_files
from scripts.ablation.sweep import ProcessError, apart, call_apart, require_same_gpu, sweep
from scripts.bench.command_line import REPOSITORY, add_results, add_time_limits, require_overrides, require_positive
from scripts.bench.provenance import describe


def step_cases(args: argparse.Namespace, device: Device) -> list[Case]:
    # In eager mode, the time of a short step would depend on the host, not on the GPU.
    settings = (device, args.precision, args.steps, args.seconds, tuple(args.overrides), device == "cuda")
    return [
        StepCase(args.model, attention, seq_len, *settings)
        for attention in dict.fromkeys(args.attentions)
        for seq_len in sorted(set(args.seq_lens))
    ]


def attention_cases(args: argparse.Namespace, device: Device) -> list[Case]:
    n_heads, head_dim, dtype = args.n_heads[0], args.head_dims[0], args.dtypes[0]
    shapes = [(x, head_dim, dtype) for x in args.n_heads]
    shapes += [(n_heads, x, dtype) for x in args.head_dims] + [(n_heads, head_dim, x) for x in args.dtypes]
    return [
        AttentionCase(attention, seq_len, *shape, device, args.steps, args.seconds)
        for shape in dict.fromkeys(shapes)
        for attention in dict.fromkeys(args.attentions)
        for seq_len in sorted(set(args.attention_seq_lens))
    ]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [2**n for n in (range(10, 21) if cuda else range(8, 11))]
    alone = [2**n for n in (range(10, 17, 2) if cuda else range(8, 11))]
    chosen = ["naive", "chunked", "sdpa", "flash"] if cuda else ["naive", "chunked", "sdpa"]
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for model, attention, memory and optimizer")
    parser.add_argument("--only", choices=("step", "attention"), help="run one of the two sweeps only")
    parser.add_argument("--model", choices=options("model"), default="gpt2" if cuda else "nano")
    parser.add_argument("--attentions", nargs="+", choices=options("attention"), default=chosen)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=lengths, help="tokens of a training step")
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed" if cuda else "32-true")
    parser.add_argument("--attention-seq-lens", type=int, nargs="+", default=alone, help="tokens of attention alone")
    parser.add_argument(
        "--n-heads", type=int, nargs="+", default=[16, 32] if cuda else [4, 8], help="heads of attention alone"
    )
    parser.add_argument(
        "--head-dims",
        type=int,
        nargs="+",
        default=[64, 128] if cuda else [32, 64],
        help="channels per head of attention alone",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=["bf16", "fp32"] if cuda else ["fp32"],
        help="dtypes of attention alone",
    )
    parser.add_argument("--steps", type=int, default=10 if cuda else 3, help="maximum number of timed steps of a case")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="time limit of a case; no step starts that would probably exceed it"
    )
    parser.add_argument(
        "--max-step-seconds", type=float, default=30.0, help="cases with longer predicted steps are not run"
    )
    parser.add_argument("--no-wandb", action="store_true", help="write files only")
    parser.add_argument("--project", default="fa_train", help="project on Weights & Biases")
    parser.add_argument("--group", help="group on Weights & Biases; default: ablate_memory and the name of OUT")
    add_time_limits(parser, timeout=900, budget=True)
    add_results(parser, "runs/ablate_memory/<model>_<device>", kind="folder")
    args = parser.parse_args(arguments)
    positive = ("steps", "seconds", "max_step_seconds", "timeout", "budget")
    require_positive(parser, args, (*positive, "seq_lens", "attention_seq_lens", "n_heads", "head_dims"))
    require_overrides(parser, args.overrides)
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [] if args.only == "attention" else step_cases(args, device)
    cases += [] if args.only == "step" else attention_cases(args, device)
    folder: Path = (args.out or REPOSITORY / "runs" / "ablate_memory" / f"{args.model}_{device}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "results.jsonl", folder / "cases.log"
    with errors_in_one_line((ProcessError, ValueError, HydraException, OmegaConfBaseException)):
        mode = None if args.no_wandb else known_mode()
        # Query the memory in another process, because a CUDA context in this process would leave less GPU memory for
        # the cases.
        device_bytes = call_apart(capacity, (device,), args.timeout, log)
        gpu = call_apart(torch.cuda.get_device_name, (), args.timeout, log) if device == "cuda" else "no GPU"
        require_same_gpu(gpu, folder, has_results=path.exists(), key="--out")
        for text in explanations(cases, device_bytes):
            print(text, flush=True)
    records = Records(mode, args.project, args.group or f"ablate_memory {folder.name}", folder)

    def run(case: Case) -> Result:
        return apart(measure, (case,), args.timeout, log)

    try:
        rows = sweep(cases, path, run, records.case, args.max_step_seconds, args.budget)
    except KeyboardInterrupt:
        print(f"stopped; {path} holds the finished cases. Run the same command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    head = describe("-m scripts.ablate_memory", args.commit)
    parts = []
    if steps := [(case, result) for case, result in rows if isinstance(case, StepCase)]:
        parts.append(step_part(steps, device_bytes, head["GPU"]))
    if alone := [(case, result) for case, result in rows if isinstance(case, AttentionCase)]:
        parts.append(attention_part(alone, device_bytes, head["GPU"]))
    write_files(parts, head, folder)
    records.summary(parts, head)
    print(f"results: {folder}")


def known_mode() -> str:
    """Returns the mode of W&B.

    Raises: ValueError if wandb refuses an environment variable, or if WANDB_MODE is online without an API key.
    """
    from fa_train.wandb_mode import require_api_key, require_known_variables, wandb_mode

    require_known_variables()
    if os.environ.get("WANDB_MODE") == "online":
        require_api_key("WANDB_MODE=online")
    return wandb_mode()


def explanations(cases: list[Case], device_bytes: int) -> list[str]:
    """Returns texts about the minimum memory of naive attention."""
    formulas: dict[str, Formula] = {}
    for case in cases:
        what = f"a training step of {case.model}" if isinstance(case, StepCase) else f"alone, {case.shape}"
        if what not in formulas:
            formulas[what] = step_formula(case) if isinstance(case, StepCase) else attention_formula(case, "both")
    return [formula.explain(what, device_bytes) for what, formula in formulas.items()]


if __name__ == "__main__":
    main()
