"""Computes the bytes that naive and flash attention move to and from device memory, and measures them with ncu.

    python -m scripts.bench.io_traffic                        # formulas, and measurements if a GPU and ncu exist.
    python -m scripts.bench.io_traffic --no-ncu --arch sm90   # formulas alone, on any machine.

Writes OUT.md. The problem is one sequence of N tokens in bf16, with n_heads * head_dim = 2048. Each query head has its
own KV head. Elements are counted per head.

S denotes the scores, and P the softmax of S. The forward of naive attention moves `4 * N**2 + 4 * N * d` elements. The
three kernels of the naive forward compute S from Q and K, P from S, and O from P and V. In the forward, a causal mask
adds three transfers: reading S, reading one byte of mask per score, and writing S.

If P is kept from the forward, the backward of naive attention moves `7 * N**2 + 8 * N * d` elements. The five kernels
of the naive backward compute dV from P and dO, dP from dO and V, dS from dP and P, dQ from dS and K, and dK from dS and
Q. In the backward, a causal mask adds three transfers: reading dS, reading one byte of mask per score, and writing dS.

In flash attention, each query tile reads its own rows once, and reads all keys and values that its queries see. By
theorem 2 of arXiv:2205.14135, flash attention moves O(`N**2 * d**2 / M`) elements, where M is the number of elements
that fast memory holds. The formulas for flash attention count all bytes that the multiprocessors load, although most of
them come from the L2 cache. The column `least` shows the traffic of a kernel that moves each tensor only once.
"""

import argparse
import csv
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fa_kernels import flash_attn_func
from fa_kernels.device import Arch, arch_of, interpreted
from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.hopper.backward import choose as hopper_bwd
from fa_kernels.flash_attention.hopper.backward import items, wide
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS, ROWS, forward_config
from fa_kernels.flash_attention.schedule import WORK_TILE, length_class_of
from fa_kernels.flash_attention.tiles import SHARED_LIMIT, Pass, key_passes, tile_config
from scripts.bench.attention import MODEL_DIM
from scripts.bench.command_line import REPOSITORY, add_results, require_positive
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix

ITEM = 2  # bytes of bf16
FP32 = 4
ROW_RANGE = 8  # bytes for the start and the end of a row's visible range (two int32)
PEAK_TFLOPS, BANDWIDTH_TBS = 989.0, 4.8  # dense bf16 TFLOP/s, and memory bandwidth in TB/s, of an H200
Direction = Literal["forward", "backward"]
METHODS = ("naive", "portable", "hopper")
# Maps a pass to (tensors that a key tile reads once, fp32 values that it reads per row of Q, output tensors).
# The pass `dv` needs neither V nor delta, because dV = P^T dO.
KEY_PASSES: dict[Pass, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "dkdv": (("K", "V"), ("lse", "delta"), ("dK", "dV")),
    "dk": (("K", "V"), ("lse", "delta"), ("dK",)),
    "dv": (("K",), ("lse",), ("dV",)),
}
# Units: bytes from and to device memory, 32-byte sectors between L2 and the multiprocessors, nanoseconds.
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors_srcunit_tex.sum", "gpu__time_duration.sum")
SEPARATOR = "spin_kernel"  # name of the kernel of torch.cuda._sleep, which marks the end of a case


@dataclass(frozen=True)
class Case:
    """One pass (forward or backward) of one method over one sequence."""

    method: str
    direction: Direction
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def n_heads(self) -> int:
        return MODEL_DIM // self.head_dim

    def flops(self) -> float:
        """Returns the FLOPs of the necessary matmuls: two in the forward or five in the backward, halved if causal."""
        forward = 4 * self.n_heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (2.5 if self.direction == "backward" else 1)


@dataclass(frozen=True)
class Measured:
    """The sums of ncu's counters over the kernels of a case."""

    read: float  # bytes
    written: float
    l2: float  # bytes between the L2 cache and the multiprocessors
    seconds: float


def transfers(case: Case, arch: Arch) -> dict[str, int]:
    """Returns the bytes of each transfer of a case, by the transfer's name, summed over all heads."""
    if case.method == "naive":
        per_head = _naive_forward(case) if case.direction == "forward" else _naive_backward(case)
    elif case.direction == "forward":
        per_head = _flash_forward(case, arch)
    else:
        per_head = _hopper_backward(case) if case.method == "hopper" else _portable_backward(case, arch)
    return {name: size * case.n_heads for name, size in per_head.items()}


def _naive_forward(case: Case) -> dict[str, int]:
    square, rows = case.seqlen**2 * ITEM, case.seqlen * case.head_dim * ITEM
    return {
        "read Q, K": 2 * rows,
        "write S": square,
        **({"mask: read S": square, "mask: read mask": case.seqlen**2, "mask: write S": square} if case.causal else {}),
        "read S": square,
        "write P": square,
        "read P": square,
        "read V": rows,
        "write O": rows,
    }


def _naive_backward(case: Case) -> dict[str, int]:
    square, rows = case.seqlen**2 * ITEM, case.seqlen * case.head_dim * ITEM
    masking = {"mask: read dS": square, "mask: read mask": case.seqlen**2, "mask: write dS": square}
    return {
        "dV: read P": square,
        "dV: read dO": rows,
        "dV: write dV": rows,
        "dP: read dO, V": 2 * rows,
        "dP: write dP": square,
        "dS: read dP": square,
        "dS: read P": square,
        "dS: write dS": square,
        **(masking if case.causal else {}),
        "dQ: read dS": square,
        "dQ: read K": rows,
        "dQ: write dQ": rows,
        "dK: read dS": square,
        "dK: read Q": rows,
        "dK: write dK": rows,
    }


def _flash_forward(case: Case, arch: Arch) -> dict[str, int]:
    block_m, block_n = _blocks(case, arch, "fwd")
    rows = case.seqlen * case.head_dim * ITEM
    return {
        "read Q": rows,
        "read K, V": keys_read(case.seqlen, block_m, block_n, causal=case.causal) * 2 * case.head_dim * ITEM,
        "read ranges": case.seqlen * ROW_RANGE,
        "write O": rows,
        "write lse": case.seqlen * FP32,
    }


def _portable_backward(case: Case, arch: Arch) -> dict[str, int]:
    delta = {"delta: read O, dO": 2 * case.seqlen * case.head_dim * ITEM, "delta: write delta": case.seqlen * FP32}
    key_blocks = {name: _blocks(case, arch, name)[1] for name in key_passes(arch, case.head_dim, ITEM)}
    return {**delta, **_recomputing_backward(case, key_blocks, _blocks(case, arch, "dq"))}


def _recomputing_backward(case: Case, key_blocks: dict[Pass, int], query_blocks: tuple[int, int]) -> dict[str, int]:
    """Returns the bytes of a backward in which every pass recomputes the scores.

    query_blocks: (queries per tile, keys per block) of the pass over query tiles.
    """
    rows, ranges = case.seqlen * case.head_dim * ITEM, case.seqlen * ROW_RANGE
    sizes: dict[str, int] = {}
    for name, block_n in key_blocks.items():
        queries = queries_read(case.seqlen, block_n, causal=case.causal)
        kept, of_rows, written = KEY_PASSES[name]
        sizes |= {
            f"{name}: read {', '.join(kept)}": len(kept) * rows,
            f"{name}: read Q, dO": queries * 2 * case.head_dim * ITEM,
            f"{name}: read {', '.join(of_rows)}": queries * len(of_rows) * FP32,
            f"{name}: read ranges": ranges,
            f"{name}: write {', '.join(written)}": len(written) * rows,
        }
    keys = keys_read(case.seqlen, *query_blocks, causal=case.causal)
    return sizes | {
        "dq: read Q, dO": 2 * rows,
        "dq: read lse, delta": case.seqlen * 2 * FP32,
        "dq: read K, V": keys * 2 * case.head_dim * ITEM,
        "dq: read ranges": ranges,
        "dq: write dQ": rows,
    }


def _hopper_backward(case: Case) -> dict[str, int]:
    prepared = {
        "prepare: read O, dO": 2 * case.seqlen * case.head_dim * ITEM,
        "prepare: read lse": case.seqlen * FP32,
        "prepare: write lse, delta": case.seqlen * 2 * FP32,
    }
    if case.head_dim == wide.HEAD_DIM:
        passes = _recomputing_backward(case, {"dkdv": wide.BLOCK}, (WORK_TILE, wide.BLOCK))
        return {**prepared, "prepare: write delta for dq": case.seqlen * FP32, **passes}
    rows = case.seqlen * case.head_dim * ITEM
    sums = case.seqlen * case.head_dim * FP32
    queries = queries_read(case.seqlen, items.BLOCK_N, causal=case.causal)
    return {
        **prepared,
        "prepare: write zeros of dQ": sums,
        "read K, V": 2 * rows,
        "read Q, dO": queries * 2 * case.head_dim * ITEM,
        "read lse, delta": queries * 2 * FP32,
        "add to dQ": queries * case.head_dim * FP32,
        "write dK, dV": 2 * rows,
        "finish: read sum of dQ": sums,
        "finish: write dQ": rows,
    }


def _blocks(case: Case, arch: Arch, direction: Pass) -> tuple[int, int]:
    if case.method == "hopper":
        of_hopper = forward_config(case.head_dim, length_class_of(case.seqlen))
        return of_hopper.consumers * ROWS, of_hopper.block_n
    config = tile_config(arch, case.head_dim, direction, ITEM)
    return config.block_m, config.block_n


def keys_read(seqlen: int, block_m: int, block_n: int, *, causal: bool) -> int:
    """Returns the number of rows of K that all query tiles of one head load in total."""
    if not causal:
        return math.ceil(seqlen / block_m) * seqlen
    ends = (min(first + block_m, seqlen) for first in range(0, seqlen, block_m))
    return sum(min(math.ceil(end / block_n) * block_n, seqlen) for end in ends)


def queries_read(seqlen: int, block_n: int, *, causal: bool) -> int:
    """Returns the number of rows of Q that all key tiles of one head load in total."""
    return sum(seqlen - (first if causal else 0) for first in range(0, seqlen, block_n))


def least_bytes(case: Case) -> int:
    """Returns the bytes of Q, K, V, O and lse, and for the backward pass also those of dO, dQ, dK and dV."""
    rows, row_values = case.seqlen * case.head_dim * ITEM, case.seqlen * FP32
    per_head = 4 * rows + row_values if case.direction == "forward" else 8 * rows + row_values
    return per_head * case.n_heads


def order_bytes(case: Case, arch: Arch) -> float:
    """Returns the theoretical lower bound of the traffic in bytes, without its constant factor."""
    n, d = case.seqlen, case.head_dim
    elements = n * n + n * d if case.method == "naive" else n * n * d * d / (SHARED_LIMIT[arch] / ITEM)
    return elements * ITEM * case.n_heads


def roofline(flops: float, moved: float, peak_tflops: float, bandwidth_tbs: float) -> tuple[float, float, str]:
    """Returns the FLOPs per byte, the attainable TFLOP/s, and whether memory or compute is the limit."""
    intensity = flops / moved
    by_memory = intensity * bandwidth_tbs
    return intensity, min(by_memory, peak_tflops), "memory" if by_memory < peak_tflops else "compute"


def cases_of(args: argparse.Namespace, arch: Arch) -> list[Case]:
    on_hopper: dict[str, set[int]] = {"forward": set(FORWARD_CONFIGS), "backward": set(hopper_bwd.HEAD_DIMS)}
    return [
        Case(method, direction, seqlen, head_dim, args.causal)
        for head_dim, seqlen in product(args.head_dims, args.seqlens)
        for direction in ("forward", "backward")
        for method in args.methods
        if method != "hopper" or (arch == "sm90" and head_dim in on_hopper[direction])
    ]


def _naive(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Computes naive attention on (heads, tokens, head_dim). q must be scaled already."""
    scores = q @ k.transpose(-2, -1)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores.softmax(-1) @ v


def prepared(case: Case) -> Callable[[], object]:
    """Creates the inputs of a case, and returns a function that runs the forward or the backward pass.

    For a backward pass, `prepared` itself runs the forward pass once.
    """
    heads, tokens, width = case.n_heads, case.seqlen, case.head_dim
    shape = (heads, tokens, width) if case.method == "naive" else (1, tokens, heads, width)
    q, k, v, do = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    scaled = (q * width**-0.5).detach().requires_grad_()

    def forward() -> Tensor:
        if case.method != "naive":
            os.environ[backend.VARIABLE] = case.method
            o = flash_attn_func(q, k, v, causal=case.causal)
            assert isinstance(o, Tensor)
            return o
        return _naive(scaled, k, v, hidden)

    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").triu(1) if case.causal else None
    if case.direction == "forward":
        return forward
    o = forward()
    return lambda: torch.autograd.grad(o, (scaled if case.method == "naive" else q, k, v), do, retain_graph=True)


def run_under_ncu(cases: list[Case]) -> None:
    """Runs each case once while ncu records, and ends each case with a separator kernel."""
    for case in cases:
        work = prepared(case)
        work()  # ncu does not record this first call, which also compiles or selects kernels
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        work()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        del work
        torch.cuda.empty_cache()


def measure(ncu: str, cases: list[Case], arguments: list[str]) -> list[Measured]:
    """Runs this script again under ncu. Raises: RuntimeError with the reason if ncu gives no result."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        command = [
            ncu, "--target-processes", "application-only", "--profile-from-start", "off", "--clock-control", "none",
            "--cache-control", "none", "--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--print-units",
            "base", "--log-file", str(log),
            sys.executable, "-m", "scripts.bench.io_traffic", *arguments, "--under-ncu",
        ]  # fmt: skip
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if result.returncode:
        said = [
            line for line in (text + result.stdout + result.stderr).splitlines() if "ERROR" in line or "Error" in line
        ]
        raise RuntimeError(said[0] if said else f"ncu ended with exit status {result.returncode}")
    found = list(read_counts(text))
    if len(found) != len(cases):
        raise RuntimeError(f"ncu's table must contain {len(cases)} cases; found {len(found)}")
    return found


def read_counts(text: str) -> Iterator[Measured]:
    """Yields the sums of ncu's counters for each case.

    ncu's raw CSV has a line per kernel; a separator kernel ends a case.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    total = dict.fromkeys(METRICS, 0.0)
    for row in csv.DictReader(lines[start:]):
        if not row["ID"]:  # the line of the CSV that names the units
            continue
        if SEPARATOR not in row["Kernel Name"]:
            for metric in METRICS:
                total[metric] += float(row[metric].replace(",", ""))
            continue
        read, written, sectors, nanoseconds = (total[metric] for metric in METRICS)
        yield Measured(read, written, 32 * sectors, nanoseconds / 1e9)
        total = dict.fromkeys(METRICS, 0.0)


def markdown(
    cases: list[Case],
    measured: list[Measured] | None,
    head: dict[str, str],
    arch: Arch,
    peak_tflops: float,
    bandwidth_tbs: float,
) -> str:
    """Formats the page: its header, the table, and the naive formulas with the values of the first case."""
    causal = "causal" if cases[0].causal else "not causal"
    lines = [
        *header("Bytes moved by attention, and the roofline", head),
        f"bf16, one sequence of N tokens, {causal}, n_heads × head_dim = {MODEL_DIM}, tiles of {arch}. Bytes are in GB "
        "(10⁹).",
        "",
        "- Θ: N² + Nd elements for naive, N²d²/M for flash, without constant factors",
        "- formula: the bytes that the kernels read and write (see `scripts/bench/io_traffic.py`); for flash, the "
        "multiprocessors load this many bytes, most of them from L2",
        "- least: the bytes of every tensor once",
        "- × least: formula / least; for the naive forward without a mask N/d + 1, minus the share of lse",
        "- L2: measured between L2 and the multiprocessors",
        "- read, written: measured from and to device memory, including the schedule that flash builds in a call",
        "- FLOP/byte: per byte of device memory, "
        f"{'measured' if measured else 'computed from the formula for naive and from the least for flash'}",
        f"- roof: the limit given by {peak_tflops:g} TFLOP/s and {bandwidth_tbs:g} TB/s, which are equal at "
        f"{peak_tflops / bandwidth_tbs:.0f} FLOP/byte",
        "",
        "| pass | d | N | N/d | method | Θ | formula | least | × least | L2 | read | written | FLOP/byte | bound by | "
        "roof TFLOP/s | got TFLOP/s |",
        "|:--|--:|--:|--:|:--|" + "--:|" * 8 + ":--|--:|--:|",
    ]
    for index, case in enumerate(cases):
        formula, least = sum(transfers(case, arch).values()), least_bytes(case)
        counted = measured[index] if measured else None
        moved = counted.read + counted.written if counted else formula if case.method == "naive" else least
        intensity, roof, bound = roofline(case.flops(), moved, peak_tflops, bandwidth_tbs)
        found = [f"{x / 1e9:.3f}" for x in (counted.l2, counted.read, counted.written)] if counted else ["–"] * 3
        got = f"{case.flops() / counted.seconds / 1e12:.0f}" if counted else "–"
        cells = [
            case.direction, case.head_dim, case.seqlen, f"{case.seqlen / case.head_dim:g}", case.method,
            f"{order_bytes(case, arch) / 1e9:.3f}", f"{formula / 1e9:.3f}", f"{least / 1e9:.3f}",
            f"{formula / least:.1f}", *found, f"{intensity:.0f}", bound, f"{roof:.0f}", got,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    spelt = [case for case in cases if (case.seqlen, case.head_dim) == (cases[0].seqlen, cases[0].head_dim)]
    lines += ["", f"## The formulas at N = {cases[0].seqlen}, d = {cases[0].head_dim}, GB", ""]
    for case in spelt:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in transfers(case, arch).items())
        lines.append(f"- {case.method}, {case.direction}: {parts}")
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16384], help="tokens")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], help=f"divisors of {MODEL_DIM}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--arch", choices=list(SHARED_LIMIT), help="architecture of the tiles; default: this GPU's, or sm90"
    )
    parser.add_argument(
        "--ncu", action=argparse.BooleanOptionalAction, default=True, help="measure with ncu, if it is installed"
    )
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="TFLOP/s of the roofline")
    parser.add_argument("--bandwidth-tbs", type=float, default=BANDWIDTH_TBS, help="TB/s of the roofline")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    add_results(parser, "scripts/results/io_traffic_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    for head_dim in args.head_dims:
        if not 8 <= head_dim <= 256 or MODEL_DIM % head_dim:
            parser.error(f"--head-dims must divide {MODEL_DIM} and be 8 to 256; got {head_dim}")
    require_positive(parser, args, ("seqlens",))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    on_gpu = torch.cuda.is_available() and not interpreted()
    arch: Arch = args.arch or (arch_of(torch.device("cuda")) if on_gpu else "sm90")
    if arch == "unknown":
        arch = "sm80"  # fa_kernels derives the tiles of unknown GPUs from those of sm80
    cases = cases_of(args, arch)
    if args.under_ncu:
        run_under_ncu(cases)
        return
    head = describe("-m scripts.bench.io_traffic", args.commit)
    if not on_gpu:
        head["GPU"] = "none"
    measured = None
    ncu = shutil.which("ncu")
    if not (args.ncu and on_gpu and ncu):
        reason = "--no-ncu" if not args.ncu else "no GPU" if not on_gpu else "no ncu on the PATH"
    else:
        try:
            measured = measure(ncu, cases, sys.argv[1:])
            reason = ""
        except RuntimeError as error:
            reason = str(error)
    head["measured"] = f"with {ncu}, {', '.join(METRICS)}" if measured else f"no, formulas only: {reason}"
    print(f"measured: {head['measured']}")
    out = results_prefix(args.out, "io_traffic", gpu=None if on_gpu else f"formula-{arch}")
    text = markdown(cases, measured, head, arch, args.peak_tflops, args.bandwidth_tbs)
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    print(f"{text}\nresults: {out}.md")


if __name__ == "__main__":
    main()
