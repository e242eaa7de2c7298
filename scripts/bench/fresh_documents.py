"""Measures the GPU and host time of attention over packed documents that differ from call to call.

    python -m scripts.bench.fresh_documents                 # 64k tokens in documents of 64 to 512 tokens.
    python -m scripts.bench.fresh_documents --rounds 5 --backends fa3 ours    # five rounds.

Consecutive calls get different cu_seqlens, mostly with different numbers of documents. No attention schedule is built
in advance. Calls are not replayed as a CUDA graph, so the time per call is the longer of the host time and the GPU
time. The backends run in random order. FlashAttention-3 (`fa3-fwd`, forward only) and FlashAttention-4 (`flash-attn-4`)
run if they are installed. A sample consists of several calls without a GPU sync between them. The host time of a sample
ends when its last call returns.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.attention import MODULES, fill_row, installed, output_of, varlen_arguments
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.host import Sample, order, sample
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu

SHORTEST, LONGEST = 64, 512  # tokens in a document
BATCHES = 64  # number of different batches that the calls use in turn
WARM_UP = 8  # number of untimed calls of each pass before the first sample
PASSES = ("forward", "forward + backward")

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # arguments: q, k, v and cu_seqlens


@dataclass(frozen=True)
class Shape:
    head_dim: int
    n_heads: int
    n_kv_heads: int

    def __str__(self) -> str:
        return f"d={self.head_dim}, {self.n_heads} query and {self.n_kv_heads} KV heads"

    def flops(self, lengths: Sequence[int], direction: str) -> float:
        """Returns the FLOPs of a causal pass; the backward counts 2.5 times as much as the forward."""
        forward = 2.0 * self.n_heads * self.head_dim * sum(length**2 for length in lengths)
        return forward * (3.5 if direction == PASSES[1] else 1)


SHAPES = Shape(128, 16, 16), Shape(128, 32, 8), Shape(64, 32, 32)


def random_documents(tokens: int, batches: int) -> list[tuple[int, ...]]:
    """Returns the document lengths of each batch, which are the same in every process."""
    generator = random.Random(0)
    most = -(-tokens // SHORTEST)
    return [fill_row([generator.randint(SHORTEST, LONGEST) for _ in range(most)], tokens) for _ in range(batches)]


def attentions() -> dict[str, Attention]:
    """Returns the causal attention function of each installed backend."""
    modules = {name: import_module(module) for name, module in MODULES.items() if installed(name)}
    return {name: partial(_varlen, module.flash_attn_varlen_func) for name, module in modules.items()}


def _varlen(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return output_of(function(q, k, v, **varlen_arguments(cu_seqlens, LONGEST), causal=True))


def calls_of(
    attention: Attention, shape: Shape, batches: Iterator[Tensor], tokens: int
) -> dict[str, Callable[[], None]]:
    """Returns a function for each pass. Each call of a function takes the next batch of documents from `batches`."""
    q, k, v, do = (
        torch.randn(tokens, heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads, shape.n_heads)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v, next(batches))

    def forward_and_backward() -> None:
        torch.autograd.grad(attention(leaves[0], leaves[1], leaves[2], next(batches)), leaves, do)

    return dict(zip(PASSES, (forward, forward_and_backward), strict=True))


def measure(
    chosen: Mapping[str, Attention], shape: Shape, batches: Sequence[Tensor], tokens: int, rounds: int, calls: int
) -> dict[tuple[str, str], list[Sample]]:
    """Returns the samples for each pair of backend and pass."""
    runs = {
        (name, direction): run
        for name, attention in chosen.items()
        for direction, run in calls_of(attention, shape, cycle(batches), tokens).items()
        if name != "fa3" or direction == PASSES[0]
    }
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    samples: dict[tuple[str, str], list[Sample]] = {place: [] for place in runs}
    for place in order([*runs], rounds):
        samples[place].append(sample(runs[place], calls))
    return samples


def table(
    samples: Mapping[tuple[str, str], Sequence[Sample]], shape: Shape, documents: Sequence[Sequence[int]]
) -> list[str]:
    """Returns the lines of the table for one shape."""
    lines = [
        f"## {shape}",
        "",
        "| pass | backend | us per call | TFLOP/s | host us per call |",
        "|:--|:--|--:|--:|--:|",
    ]
    for direction in PASSES:
        flops = statistics.mean(shape.flops(lengths, direction) for lengths in documents)
        for (name, other), found in sorted(samples.items()):
            if other == direction:
                total, host = statistics.median(x.total_us for x in found), statistics.median(x.us for x in found)
                lines.append(f"| {direction} | {name} | {total:.1f} | {flops / total * 1e-6:.0f} | {host:.1f} |")
    return [*lines, ""]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per call")
    parser.add_argument("--backends", nargs="+", choices=MODULES, help="default: all that are installed")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each pass")
    parser.add_argument(
        "--calls", type=int, default=50, help="calls in a sample; more than 60 may fill the GPU's queue"
    )
    add_results(parser, "scripts/results/fresh_documents_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    require_positive(parser, args, ("tokens", "rounds", "calls"))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.fresh_documents")
    out = results_prefix(args.out, "fresh_documents")
    head = describe("-m scripts.bench.fresh_documents", args.commit)
    chosen = {name: run for name, run in attentions().items() if args.backends is None or name in args.backends}
    if missing := set(args.backends or ()) - chosen.keys():
        sys.exit(f"--backends must be installed; missing: {', '.join(sorted(missing))}")
    documents = random_documents(args.tokens, BATCHES)
    batches = [torch.tensor((0, *lengths)).cumsum(0).to("cuda", torch.int32) for lengths in documents]
    lines = header("Attention over documents that differ in every call", head)
    lines += [f"{args.tokens} tokens, causal, bf16. Medians of {args.rounds} samples of {args.calls} calls.", ""]
    print("\n".join(lines), flush=True)
    for shape in SHAPES:
        found = table(measure(chosen, shape, batches, args.tokens, args.rounds, args.calls), shape, documents)
        print("\n".join(found), flush=True)
        lines += found
    Path(f"{out}.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
