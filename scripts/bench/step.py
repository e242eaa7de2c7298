"""Compares our training step with that of Hugging Face transformers and Liger's kernels: tokens/s, memory and MFU.

    python -m scripts.bench.step                                            # llama_1b at 8k, 32k and 128k, one GPU.
    python -m scripts.bench.step --seq-lens 8192 --variants ours-none-compiled hf    # one length, two variants.
    python -m scripts.bench.step --cases 8192:ours-none 131072:hf-checkpointing model.n_layers=8    # two cases.
    python -m scripts.bench.step --variants hf hf-fa_train ours-none-compiled data.document_len=2048    # packed.

Each step trains on seq_len random tokens. The random tokens are one document, or packed documents of data.document_len
tokens. Our variants and the peer (transformers) use fp32 weights, bf16 autocast and the optimizer of conf/optimizer. A
step of our variants is a training step of train.py, which runs LitGPT in Lightning's loop, with gradient clipping and
the Monitor callback. A step of transformers is a step of a plain loop: forward, backward, optimizer. Each case runs in
a new process, so running out of memory affects only that case. Times are host times, with a device sync after each
step. Peak memory and reserved memory are the CUDA allocator's maxima over all steps. On a CPU, peak memory is that of
the process. MFU counts the FLOPs of causal attention and of the matrix products as fa_train/flops.py does, without
recomputation.

Our variants are named ours-MEMORY[-compiled][-portable]. MEMORY is an option of conf/memory, `compiled` sets
lit_gpt.compile_model=true, and `portable` disables the Hopper kernels (FLASH_ATTENTION_BACKEND). The variants hf and
hf-checkpointing are transformers' LlamaForCausalLM with SDPA and Liger's RMSNorm, RoPE, SwiGLU and fused linear cross
entropy. The variants hf-fa_train and hf-fa_train-checkpointing use our attention instead of SDPA
(fa_train/integrations/transformers.py). If Liger cannot run, transformers is measured without it, and the row says so.
The script writes OUT.csv and OUT.md after every case.
"""

import argparse
import csv
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

import train  # registers the resolvers of conf/train.yaml
from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.flops import peak_flops, train_flops
from fa_train.integrations.transformers import NAME as FA_TRAIN
from fa_train.integrations.transformers import register as register_attention
from fa_train.models.gpt import GPT
from scripts.bench.command_line import add_results, add_time_limits, require_overrides, require_positive
from scripts.bench.provenance import describe
from scripts.bench.training_case import (
    FEWEST_STEPS,
    REPOSITORY,
    VOCABULARY,
    WARMUP,
    Device,
    Loss,
    StepTimes,
    memory_gib,
    wait,
)
from scripts.bench.training_case import measure as measure_ours
from scripts.composed import composed, options

SEQ_LENS = (8192, 32768, 131072)
VARIANTS = (
    "ours-none-compiled",
    "ours-none",
    "ours-selective-compiled",
    "ours-full-compiled",
    "ours-offload-compiled",
    "hf",
    "hf-checkpointing",
    "hf-fa_train",
    "hf-fa_train-checkpointing",
)


class CannotRunError(Exception):
    """Raised with the reason if a variant cannot be measured on this machine."""


@dataclass(frozen=True)
class Variant:
    """One implementation of a training step, and its settings.

    `memory` applies to our model only, `checkpointing` and `fa_train` to transformers only.
    """

    ours: bool
    memory: str = "none"
    compiled: bool = False
    portable: bool = False
    checkpointing: bool = False
    fa_train: bool = False  # whether transformers runs with our attention


@dataclass(frozen=True)
class Case:
    model: str
    seq_len: int  # tokens
    variant: str
    device: Device
    attention: str  # applies to ours only
    steps: int  # number of timed steps
    slow_step: float  # seconds; if a step takes longer, only `FEWEST_STEPS` steps are timed
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One result. Numbers are None unless the outcome is "ok".

    mfu is also None if the peak FLOP/s of the device is unknown.
    """

    seq_len: int
    variant: str
    outcome: str  # "ok", "oom", "missing: REASON" or "failed: REASON"
    tokens_per_s: float | None = None
    step_ms: float | None = None  # median
    step_ms_min: float | None = None
    step_ms_max: float | None = None
    steps: int | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    mfu: float | None = None
    loss: float | None = None  # in the last step, in nats per label
    finite: bool | None = None  # whether the loss was finite in every step
    note: str = ""


def variant_of(name: str) -> Variant:
    """Parses a variant's name. Raises: ValueError if there is no such variant."""
    kind, *settings = name.split("-")
    memories = options("memory")
    if kind == "hf" and settings in ([], ["checkpointing"], ["fa_train"], ["fa_train", "checkpointing"]):
        return Variant(ours=False, checkpointing="checkpointing" in settings, fa_train="fa_train" in settings)
    if kind == "ours" and settings and settings[0] in memories and set(settings[1:]) <= {"compiled", "portable"}:
        return Variant(True, settings[0], "compiled" in settings, "portable" in settings)
    raise ValueError(
        f"a variant must be hf[-fa_train][-checkpointing] or ours-MEMORY[-compiled][-portable] with MEMORY one of "
        f"{', '.join(memories)}; got {name}"
    )


def configuration(case: Case) -> DictConfig:
    """Composes conf/train.yaml for this case, as train.py does. Raises: ValueError as document_lens."""
    variant = variant_of(case.variant)
    chosen = [
        f"preset={'gpu' if case.device == 'cuda' else 'cpu'}",
        f"model={case.model}",
        f"attention={case.attention}",
        f"memory={variant.memory}",
        f"seq_len={case.seq_len}",
        f"max_steps={WARMUP + case.steps}",
        "data=synthetic",
        "batch_size=1",
        f"trainer.accelerator={'gpu' if case.device == 'cuda' else 'cpu'}",
        f"lit_gpt.compile_model={str(variant.compiled).lower()}",
    ]
    config = composed([*chosen, *case.overrides])
    if config.model.vocab_size is None:
        config.model.vocab_size = VOCABULARY
    config.data.vocab_size = config.model.vocab_size
    document_lens(config)
    return config


def document_lens(config: DictConfig) -> list[int]:
    """Returns the lengths in tokens of the documents of a row.

    Raises: ValueError if a row does not hold whole documents.
    """
    length = min(config.data.document_len, config.seq_len)
    if config.seq_len % length:
        raise ValueError(f"data.document_len must divide seq_len={config.seq_len}; got {length}")
    return [length] * (config.seq_len // length)


def peer_loss(config: DictConfig, device: torch.device, variant: Variant) -> tuple[nn.Module, Loss, str]:
    """Returns transformers' LlamaForCausalLM in the sizes of our model, and a function for its mean loss over random
    tokens.

    The third result is a note if the model runs without Liger's kernels, otherwise an empty string.
    Raises: CannotRunError if transformers is not installed, or if its Llama cannot express our model.
    """
    if find_spec("transformers") is None:
        raise CannotRunError("transformers is not installed")
    wanted = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False, "qk_norm": False}
    others = {name: config.model[name] for name, value in wanted.items() if config.model[name] != value}
    if others:
        found = ", ".join(f"{name}={value}" for name, value in others.items())
        raise CannotRunError(f"Hugging Face's Llama has no {found}")
    from transformers import AutoModelForCausalLM, LlamaConfig

    if variant.fa_train:
        register_attention()
    note = without_liger(device)
    if not note:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    sizes = config.model
    llama = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads or sizes.n_heads,
        head_dim=sizes.head_dim or sizes.dim // sizes.n_heads,
        rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        max_position_embeddings=config.seq_len,
        tie_word_embeddings=sizes.tied,
        use_cache=False,
    )
    attention, lengths = FA_TRAIN if variant.fa_train else "sdpa", document_lens(config)
    with device:
        model = AutoModelForCausalLM.from_config(llama, attn_implementation=attention, dtype=torch.float32)
        tokens = torch.randint(sizes.vocab_size, (1, config.seq_len))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = tokens.masked_fill(positions == 0, -100)  # no label crosses from one document into the next
    model.to(device).train()
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss() -> Tensor:
        # Each step gets a new tensor of positions, as in training, so attention cannot reuse results of earlier steps.
        documents = {"position_ids": positions.clone()} if len(lengths) > 1 else {}
        value: Tensor = model(input_ids=tokens, labels=labels, **documents).loss
        return value

    return model, loss, note


def without_liger(device: torch.device) -> str:
    """Returns why transformers runs without Liger's kernels, or an empty string if transformers uses them."""
    if find_spec("liger_kernel") is None:
        return "plain transformers: liger-kernel is not installed"
    return "" if device.type == "cuda" else "plain transformers: Liger's kernels need a GPU"


def measure(case: Case) -> Row:
    """Runs the case in this process and returns its row. If the case runs out of memory, the row says so.

    All other errors are raised.
    """
    torch.manual_seed(0)
    config, device, variant = configuration(case), torch.device(case.device), variant_of(case.variant)
    note, times = "", StepTimes(case.steps, case.slow_step)
    try:
        if variant.ours:
            measure_ours(config, device, times)
        else:
            model, loss, note = peer_loss(config, device, variant)
            time_steps(loss, instantiate(config.optimizer)(model), device, times)
    except CannotRunError as error:
        return Row(case.seq_len, case.variant, f"missing: {error}")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak, reserved = memory_gib(device)
        return Row(case.seq_len, case.variant, "oom", peak_gib=peak, reserved_gib=reserved, note=note)
    peak, reserved = memory_gib(device)
    step_ms = statistics.median(times.milliseconds)
    return Row(
        case.seq_len,
        case.variant,
        "ok",
        tokens_per_s=case.seq_len / step_ms * 1e3,
        step_ms=step_ms,
        step_ms_min=min(times.milliseconds),
        step_ms_max=max(times.milliseconds),
        steps=len(times.milliseconds),
        peak_gib=peak,
        reserved_gib=reserved,
        mfu=mfu(config, step_ms, case.device),
        loss=times.losses[-1],
        finite=all(map(math.isfinite, times.losses)),
        note=note,
    )


def time_steps(loss: Loss, optimizer: torch.optim.Optimizer, device: torch.device, times: StepTimes) -> None:
    """Runs and times steps of a plain loop (forward, backward, optimizer), until `times` is complete."""
    while not times.complete:
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        times.add(time.perf_counter() - start, value.item())


def mfu(config: DictConfig, step_ms: float, device: Device) -> float | None:
    """Returns the MFU of one step, or None if the peak FLOP/s of the device is unknown.

    The FLOPs are those of our model.
    """
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if device == "cuda" else None
    if peak is None:
        return None
    with torch.device("meta"):
        model: GPT = instantiate(config.model)
    squares = float(sum(length**2 for length in document_lens(config)))
    return train_flops(model.config, config.seq_len, squares) / step_ms * 1e3 / peak


def run_apart(case: Case, timeout: float) -> Row:
    """Runs the case in a new process for at most `timeout` seconds and returns its row."""
    command = [sys.executable, "-m", "scripts.bench.step", "--case", json.dumps(asdict(case))]
    backend = "portable" if variant_of(case.variant).portable else "auto"
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"FLASH_ATTENTION_BACKEND": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the compiler processes that the case has started
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Row(case.seq_len, case.variant, f"failed: not done after {timeout:g} s")
    if process.returncode == -signal.SIGKILL:  # The Linux OOM killer uses SIGKILL when host memory is exhausted.
        return Row(case.seq_len, case.variant, "oom", note="the host's memory")
    if process.returncode:
        reason = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        print(errors, file=sys.stderr)
        return Row(case.seq_len, case.variant, f"failed: {reason.removeprefix('error: ')}")
    return Row(**json.loads(out.splitlines()[-1]))


def case_of(settings: dict[str, Any]) -> Case:
    return Case(**settings | {"overrides": tuple(settings["overrides"])})


def write(rows: list[Row], head: dict[str, str], out: Path) -> None:
    """Writes OUT.csv and OUT.md."""
    names = [field.name for field in fields(Row)]
    with Path(f"{out}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    lines = ["# A training step: ours and Hugging Face with Liger", ""]
    lines += [f"- {key}: `{value}`" for key, value in head.items()]
    lines += ["", "tokens/s and ms are medians of the timed steps, with the fastest and slowest ms in brackets.", ""]
    lines += ["| seq_len | variant | tokens/s | × best peer | ms | peak GiB | reserved GiB | MFU | loss | note |"]
    lines += ["|--:|:--|--:|--:|--:|--:|--:|--:|--:|:--|"]
    lines += [f"| {' | '.join(cells(row, rows))} |" for row in rows]
    Path(f"{out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def cells(row: Row, rows: list[Row]) -> list[str]:
    """Returns the cells of a table line. One cell compares the speed of `row` with that of the fastest variant of
    transformers in `rows`.
    """
    outcome = "" if row.outcome == "ok" else row.outcome
    note = "; ".join(part for part in (outcome, row.note) if part).replace("|", "/")
    gib = [_shown(row.peak_gib, ".2f"), _shown(row.reserved_gib, ".2f")]
    if row.step_ms is None or row.tokens_per_s is None:
        return [f"{row.seq_len:,}", row.variant, *["–"] * 3, *gib, "–", "–", note]
    peer = best_peer(rows, row.seq_len)
    return [
        f"{row.seq_len:,}",
        row.variant,
        f"{row.tokens_per_s:,.0f}",
        _shown(row.tokens_per_s / peer if peer else None, ".2f"),
        f"{row.step_ms:,.1f} ({row.step_ms_min:,.1f} to {row.step_ms_max:,.1f}, {row.steps} steps)",
        *gib,
        _shown(row.mfu, ".1%"),
        f"{row.loss:.4f}" if row.finite else "not finite",
        note,
    ]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def best_peer(rows: list[Row], seq_len: int) -> float | None:
    """Returns the tokens/s of the fastest variant of transformers with SDPA at this length, or None."""
    peers = [row for row in rows if row.seq_len == seq_len and row.variant in ("hf", "hf-checkpointing")]
    return max((row.tokens_per_s for row in peers if row.tokens_per_s is not None), default=None)


def parse_case(text: str) -> tuple[int, str]:
    """Parses SEQ_LEN:VARIANT. Raises: ValueError on anything else."""
    seq_len, _, name = text.partition(":")
    if not seq_len.isdecimal() or int(seq_len) < 1:
        raise ValueError(f"a case must be SEQ_LEN:VARIANT with a positive SEQ_LEN; got {text}")
    variant_of(name)
    return int(seq_len), name


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of conf/train.yaml; sizes also apply to the peer")
    parser.add_argument("--model", choices=options("model"), default="llama_1b")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=list(SEQ_LENS), help="tokens")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--cases", nargs="+", metavar="SEQ_LEN:VARIANT", help="run these instead of each variant at each length"
    )
    attention = "flash" if cuda else "sdpa"
    parser.add_argument("--attention", choices=options("attention"), default=attention, help="attention of ours")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps of a case, after {WARMUP} others")
    parser.add_argument(
        "--slow-step", type=float, default=6, help=f"seconds; slower steps are timed {FEWEST_STEPS} times"
    )
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    add_time_limits(parser, timeout=300)
    add_results(parser, REPOSITORY / "runs" / "bench_step")
    args = parser.parse_args(arguments)
    require_positive(parser, args, ("steps", "slow_step", "timeout", "seq_lens"))
    try:
        for name in args.variants:
            variant_of(name)
        args.cases = [parse_case(case) for case in args.cases] if args.cases else None
    except ValueError as error:
        parser.error(str(error))
    require_overrides(parser, args.overrides)
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.case is not None:
        with train.errors_in_one_line(train.MISTAKES):
            print(json.dumps(asdict(measure(case_of(args.case)))))
        return
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = args.cases or [(seq_len, name) for seq_len in args.seq_lens for name in args.variants]
    settings = args.attention, args.steps, args.slow_step, tuple(args.overrides)
    cases = [Case(args.model, seq_len, name, device, *settings) for seq_len, name in dict.fromkeys(chosen)]
    with train.errors_in_one_line(train.MISTAKES):
        configuration(cases[0])
    head = describe(shlex.join(["python", "-m", "scripts.bench.step", *sys.argv[1:]]), args.commit, date.today())
    precision = "fp32 weights, bf16 autocast" if device == "cuda" else "fp32"
    head["model"] = ", ".join([args.model, precision, f"attention={args.attention}", *args.overrides])
    out: Path = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in cases:
        rows.append(run_apart(case, args.timeout))
        print(" | ".join(cells(rows[-1], rows)), flush=True)
        write(rows, head, out)  # written after each case, so that an interrupted run keeps its results
    print(f"results: {out}.*")


if __name__ == "__main__":
    main()
