"""Compares our training step with that of Hugging Face transformers and Liger's kernels: tokens/s, memory and MFU.

    python -m scripts.bench.step                                            # llama_1b at 8k, 32k and 128k, one GPU.
    python -m scripts.bench.step --seq-lens 8192 --variants ours-none-compiled hf    # one length, two variants.
    python -m scripts.bench.step --cases 8192:ours-none 131072:hf-checkpointing model.n_layers=8    # two cases.
    python -m scripts.bench.step --variants hf hf-fa_train ours-none-compiled data.document_len=2048    # packing.
    python -m scripts.bench.step --model llama_8b --seq-lens 8192 adapter=lora trainer.precision=bf16-true    # LoRA.

Each step trains on seq_len random tokens, in one document or in packed documents of data.document_len tokens. Overrides
such as `adapter=lora` or `optimizer=adamw_8bit trainer.precision=bf16-true` apply to all variants. The default
precision is fp32 weights with bf16 autocast. A step of our variants is a training step of train.py, which runs LitGPT
in Lightning's loop, with gradient clipping and the Monitor callback. For a model of the transformers library, the
script runs a plain training loop: forward, backward, optimizer. Times are host times, with a device sync after each
step. Peak memory and reserved memory are the CUDA allocator's maxima over all steps. MFU counts FLOPs as
fa_train/flops.py does, without recomputation.

Our variants are named ours-MEMORY[-compiled[-float8]][-portable]. MEMORY is an option of conf/memory. `compiled` sets
lit_gpt.compile_model=true, and `float8` sets lit_gpt.float8=tensorwise. `portable` disables the Hopper kernels
(FLASH_ATTENTION_BACKEND). Variants whose names start with hf are transformers with Liger's kernels (see
scripts/bench/peers.py). hf, hf-compiled and hf-fa_train also exist with the suffix `-checkpointing`. The script writes
OUT.csv and OUT.md after every case. For each length, OUT.md compares the fastest peer with the fastest of our variants
that do not use float8. A peer is a variant without our attention.
"""

import argparse
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

import train
from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.flops import peak_flops
from scripts.bench.case_process import Case, add_case_options, case_of, check_case_options, require_device, result_of
from scripts.bench.command_line import REPOSITORY, add_results, add_time_limits, overrides_first
from scripts.bench.page import header, shown, write_csv
from scripts.bench.peers import CannotRunError, build_peer
from scripts.bench.peers import measure as measure_peer
from scripts.bench.provenance import describe
from scripts.bench.training_case import Device, StepTimes, document_lens, memory_gib, step_flops
from scripts.bench.training_case import measure as measure_ours
from scripts.bench.variants import VARIANTS, variant_of

SEQ_LENS = (8192, 32768, 131072)
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "fp32 weights, bf16 autocast", "bf16-true": "bf16 weights"}


@dataclass(frozen=True)
class Row:
    """One result.

    If the outcome is "ok", the row has all measured values, except that mfu is None if the device's peak FLOP/s is
    unknown. If the outcome is "oom", only peak_gib and reserved_gib can have values.
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
    loss: float | None = None  # loss of the last step, in nats per label
    finite: bool | None = None  # whether the loss was finite in every step
    note: str = ""


def configuration(case: Case) -> DictConfig:
    """Composes conf/train.yaml for this case, as train.py does.

    Raises: ValueError if a row does not hold whole documents, or if data.length_sigma is positive.
    """
    variant = variant_of(case.name)
    config = case.config(
        f"memory={variant.memory}",
        f"lit_gpt.compile_model={str(variant.compiled).lower()}",
        f"lit_gpt.float8={'tensorwise' if variant.float8 else 'null'}",
    )
    document_lens(config)
    return config


def measure(case: Case) -> Row:
    """Runs the case in this process and returns its row.

    If the variant cannot run on this machine, the outcome is the word "missing", a colon and the reason. If the case
    runs out of memory, the outcome is "oom".
    """
    torch.manual_seed(0)
    config, device, variant = configuration(case), torch.device(case.device), variant_of(case.name)
    note, times = "", StepTimes(case.steps, case.slow_step)
    try:
        if variant.ours:
            measure_ours(config, device, times)
        else:
            peer = build_peer(config, device, variant)
            note = peer.note
            measure_peer(config, device, peer, times)
    except CannotRunError as error:
        return Row(case.seq_len, case.name, f"missing: {error}")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak, reserved = memory_gib(device)
        return Row(case.seq_len, case.name, "oom", peak_gib=peak, reserved_gib=reserved, note=note)
    peak, reserved = memory_gib(device)
    step_ms = statistics.median(times.milliseconds)
    return Row(
        case.seq_len,
        case.name,
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


def mfu(config: DictConfig, step_ms: float, device: Device) -> float | None:
    """Returns the MFU of one step, or None if the peak FLOP/s of the device is unknown.

    The FLOPs are those of our model, even if the step is that of a peer.
    """
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if device == "cuda" else None
    if peak is None:
        return None
    return step_flops(config.model, document_lens(config)) / step_ms * 1e3 / peak


def run_apart(case: Case, timeout: float) -> Row:
    """Runs the case in a new process for at most `timeout` seconds and returns its row."""
    backend = "portable" if variant_of(case.name).portable else "auto"
    try:
        return Row(**result_of("scripts.bench.step", case, timeout, FLASH_ATTENTION_BACKEND=backend))
    except subprocess.TimeoutExpired:
        return Row(case.seq_len, case.name, f"failed: timed out after {timeout:g} s")
    except MemoryError:
        return Row(case.seq_len, case.name, "oom", note="the host's memory")
    except RuntimeError as error:
        return Row(case.seq_len, case.name, f"failed: {error}")


def write(rows: list[Row], head: dict[str, str], out: Path) -> None:
    """Writes OUT.csv and OUT.md."""
    write_csv(Row, rows, Path(f"{out}.csv"))
    lines = header("A training step: ours and Hugging Face with Liger", head)
    lines += ["tokens/s and ms are medians of the timed steps, with the fastest and slowest ms in brackets.", ""]
    lines += ["| seq_len | variant | tokens/s | × best peer | ms | peak GiB | reserved GiB | MFU | loss | note |"]
    lines += ["|--:|:--|--:|--:|--:|--:|--:|--:|--:|:--|"]
    lines += [f"| {' | '.join(cells(row, rows))} |" for row in rows]
    lines += ["", "The fastest variant of ours and the fastest peer, by length:", ""]
    lines += ["| seq_len | ours | tokens/s | peak GiB | peer | tokens/s | peak GiB | ours / peer |"]
    lines += ["|--:|:--|--:|--:|:--|--:|--:|--:|"]
    lines += [f"| {' | '.join(comparison(rows, seq_len))} |" for seq_len in dict.fromkeys(r.seq_len for r in rows)]
    Path(f"{out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def cells(row: Row, rows: list[Row]) -> list[str]:
    """Returns the cells of a table line."""
    outcome = "" if row.outcome == "ok" else row.outcome
    note = "; ".join(part for part in (outcome, row.note) if part).replace("|", "/")
    gib = [shown(row.peak_gib, ".2f"), shown(row.reserved_gib, ".2f")]
    if row.step_ms is None or row.tokens_per_s is None:
        return [f"{row.seq_len:,}", row.variant, *["–"] * 3, *gib, "–", "–", note]
    return [
        f"{row.seq_len:,}",
        row.variant,
        f"{row.tokens_per_s:,.0f}",
        _ratio(row, best_peer(rows, row.seq_len)),
        f"{row.step_ms:,.1f} ({row.step_ms_min:,.1f} to {row.step_ms_max:,.1f}, {row.steps} steps)",
        *gib,
        shown(row.mfu, ".1%"),
        f"{row.loss:.4f}" if row.finite else "not finite",
        note,
    ]


def comparison(rows: list[Row], seq_len: int) -> list[str]:
    """Returns the cells of a line that compares the fastest of our variants with the best peer at this length."""
    ours, peer = best_of_ours(rows, seq_len), best_peer(rows, seq_len)
    line = [f"{seq_len:,}"]
    for row in (ours, peer):
        if row is None:
            line += ["–"] * 3
        else:
            line += [row.variant, shown(row.tokens_per_s, ",.0f"), shown(row.peak_gib, ".2f")]
    return [*line, _ratio(ours, peer)]


def _ratio(row: Row | None, peer: Row | None) -> str:
    if row is None or peer is None or not row.tokens_per_s or not peer.tokens_per_s:
        return "–"
    return f"{row.tokens_per_s / peer.tokens_per_s:.2f}"


def best_of_ours(rows: list[Row], seq_len: int) -> Row | None:
    """Returns the fastest of our variants at this length, or None if no variant of ours has been measured.

    The function ignores variants with float8, because no peer computes in float8.
    """
    ours = [row for row in rows if variant_of(row.variant).ours and not variant_of(row.variant).float8]
    return _fastest([row for row in ours if row.seq_len == seq_len])


def best_peer(rows: list[Row], seq_len: int) -> Row | None:
    """Returns the fastest peer at this length, or None if no peer has been measured."""
    return _fastest([row for row in rows if row.seq_len == seq_len and variant_of(row.variant).is_peer])


def _fastest(rows: list[Row]) -> Row | None:
    measured = [row for row in rows if row.tokens_per_s is not None]
    return max(measured, key=lambda row: row.tokens_per_s or 0.0, default=None)


def parse_case(text: str) -> tuple[int, str]:
    """Parses SEQ_LEN:VARIANT. Raises: ValueError on anything else."""
    seq_len, _, name = text.partition(":")
    if not seq_len.isdecimal() or int(seq_len) < 1:
        raise ValueError(f"a case must be SEQ_LEN:VARIANT with a positive SEQ_LEN; got {text}")
    variant_of(name)
    return int(seq_len), name


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of conf/train.yaml")
    add_case_options(parser, SEQ_LENS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--cases", nargs="+", metavar="SEQ_LEN:VARIANT", help="run these cases instead of each variant at each length"
    )
    add_time_limits(parser, timeout=300)
    add_results(parser, REPOSITORY / "runs" / "bench_step")
    args = parser.parse_args(overrides_first(arguments))
    check_case_options(parser, args)
    try:
        for name in args.variants:
            variant_of(name)
        args.cases = [parse_case(case) for case in args.cases] if args.cases else None
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_device(args, "scripts.bench.step")
    chosen = args.cases or [(seq_len, name) for seq_len in args.seq_lens for name in args.variants]
    cases = [case_of(args, seq_len, name) for seq_len, name in dict.fromkeys(chosen)]
    with train.errors_in_one_line(train.MISTAKES):
        precision = configuration(cases[0]).trainer.precision
    head = describe("-m scripts.bench.step", args.commit)
    head["model"] = ", ".join(
        [args.model, PRECISIONS.get(precision, precision), f"attention={args.attention}", *args.overrides]
    )
    out: Path = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in cases:
        rows.append(run_apart(case, args.timeout))
        print(" | ".join(cells(rows[-1], rows)), flush=True)
        write(rows, head, out)
    print(f"results: {out}.*")


if __name__ == "__main__":
    main()
