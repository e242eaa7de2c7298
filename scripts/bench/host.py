"""Measures the host time of a call of our attention and of other implementations (python -m scripts.bench.host).

The inputs have so few tokens that the GPU waits for the host. Inputs are bf16, attention is causal, and attention
schedules are built in advance. `forward` is a call without gradients, and `forward, autograd` is a call with gradients.
The column `backward` shows the time of torch.autograd.grad for one call, including the start of autograd's engine and
thread. The column `backward, of 16` shows the time that one more layer of a model adds: the backward of 16 chained
calls, divided by 16. The column `backward's node` shows the time of a direct call of the backward node, without
autograd's engine.

A sample is the mean of --calls calls without a GPU sync. Each of --rounds rounds takes one sample for every cell of the
table, in random order. After the last call of a sample has returned, the GPU may need extra time to finish its work.
A cell is marked as GPU-bound if the extra GPU time of its samples, divided by the sample's time, has a median above
10%. Writes OUT.csv and OUT.md.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_kernels import flash_attn_func
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import causal_schedule
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.page import first_line, header, write_csv
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu

DOCUMENTS = 4  # number of equally long documents in the cases with several documents
WARM_UP = 5  # number of untimed calls; the first compiles, the second is recorded (kernels/fa_kernels/launch/record.py)
GPU_BOUND = 0.1  # a Row is GPU-bound if the median of Sample.left over its samples exceeds this limit
MOST_CALLS = 500
NOTHING = "a Function that does nothing"

Call = Callable[[], object]
Pass = Literal["forward", "forward, autograd", "backward", "backward, of 16", "backward's node"]
NODE: Pass = "backward's node"
CALLS: dict[Pass, int] = {  # number of chained attention calls in each pass
    "forward": 1, "forward, autograd": 1, "backward": 1, "backward, of 16": 16, NODE: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    tokens: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Candidate:
    """One implementation."""

    attend: Callable[[Tensor, Tensor, Tensor], Any]  # returns o, or a tuple that starts with o
    layout: Literal["tokens heads", "batch tokens heads", "batch heads tokens"]
    has_backward: bool = True
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext

    def calls(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[Pass, Call]:
        q, k, v, do = (
            torch.randn(self._shape(shape, heads), device=device, dtype=dtype)
            for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads, shape.n_heads)
        )
        calls: dict[Pass, Call] = {"forward": partial(self.attend, q, k, v)}
        if self.has_backward:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            calls["forward, autograd"] = partial(self.attend, *leaves)
            backwards: tuple[Pass, ...] = ("backward", "backward, of 16")
            for direction in backwards:
                of_each = [[x.clone().requires_grad_() for x in (k, v)] for _ in range(CALLS[direction])]
                calls[direction] = self._backward(leaves[0], of_each, do)
            calls[NODE] = self._node(leaves, do)
        return calls

    def _backward(self, q: Tensor, keys_and_values: Sequence[Sequence[Tensor]], do: Tensor) -> Call:
        """Returns a function that computes the gradients of q and of all tensors in keys_and_values.

        The output o of a call is the input q of the next.
        """
        o = q
        with self.setting():
            for k, v in keys_and_values:
                result = self.attend(o, k, v)
                o = result[0] if isinstance(result, tuple) else result
        leaves = [q, *(x for both in keys_and_values for x in both)]
        return partial(torch.autograd.grad, o, leaves, do, retain_graph=True)

    def _node(self, leaves: Sequence[Tensor], do: Tensor) -> Call:
        """Returns a function that calls the backward node of one attention call directly."""
        with self.setting():
            result = self.attend(*leaves)
        outputs = result if isinstance(result, tuple) else (result,)
        gradients = do, *[None] * (len(outputs) - 1)
        if hasattr(outputs[0].grad_fn, "apply"):  # the lambda holds `outputs`, so the backward node stays alive
            return lambda: outputs[0].grad_fn.apply(*gradients)
        return partial(outputs[0].grad_fn, *gradients)

    def _shape(self, shape: Shape, heads: int) -> tuple[int, ...]:
        if self.layout == "batch heads tokens":
            return 1, heads, shape.tokens, shape.head_dim
        of_tokens = shape.tokens, heads, shape.head_dim
        return of_tokens if self.layout == "tokens heads" else (1, *of_tokens)


@dataclass(frozen=True)
class Sample:
    """One sample. us: microseconds per call. left: how long the GPU still works after the last call has returned, as a
    share of the sample's time.
    """

    us: float
    left: float

    @property
    def total_us(self) -> float:
        """The microseconds per call until the GPU has finished."""
        return self.us * (1 + self.left)


@dataclass(frozen=True)
class Row:
    """One result. The times are None unless the outcome is "ok" or "GPU-bound"."""

    candidate: str
    direction: Pass
    outcome: str  # "ok", "GPU-bound" or the first line of the error
    median_us: float | None = None
    lowest_us: float | None = None
    highest_us: float | None = None

    @classmethod
    def of(cls, candidate: str, direction: Pass, samples: Sequence[Sample]) -> "Row":
        us = [sample.us for sample in samples]
        outcome = "GPU-bound" if statistics.median(sample.left for sample in samples) > GPU_BOUND else "ok"
        return cls(candidate, direction, outcome, statistics.median(us), min(us), max(us))


def grad_mode(direction: Pass) -> AbstractContextManager[Any]:
    """Returns a context manager that disables gradients in the pass "backward's node", and otherwise enables gradients.

    In the pass "backward's node", the benchmark calls the backward node of attention directly, without autograd's
    engine.
    """
    return torch.set_grad_enabled(direction != NODE)


class _Nothing(torch.autograd.Function):
    """An autograd Function that only saves its inputs and allocates its outputs, as a lower bound of the host time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.set_materialize_grads(False)
        return torch.empty_like(q), torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])


def candidates(shape: Shape, device: torch.device) -> dict[str, Candidate]:
    """Returns the attention implementations by name."""
    length = shape.tokens // DOCUMENTS
    cu_seqlens = torch.arange(DOCUMENTS + 1, dtype=torch.int32, device=device) * length
    several = f"{DOCUMENTS} documents"
    found: dict[str, Candidate] = {}
    for name, edges in (("one document", None), (several, cu_seqlens)):
        packed = partial(flash_attn_packed, schedule=causal_schedule(edges, shape.tokens, device))
        found[f"ours, {name}"] = Candidate(packed, "tokens heads")
        found[f"ours, {name}, deterministic"] = Candidate(partial(packed, deterministic=True), "tokens heads")
    found["ours, flash_attn_func"] = Candidate(partial(flash_attn_func, causal=True), "batch tokens heads")
    sdpa = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=shape.n_heads > shape.n_kv_heads)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        found[f"SDPA, {name}"] = Candidate(sdpa, "batch heads tokens", setting=partial(sdpa_kernel, backend))
    found[NOTHING] = Candidate(_Nothing.apply, "tokens heads")
    if find_spec("fa3_fwd_interface"):
        import fa3_fwd_interface as fa3

        dense = partial(fa3.flash_attn_func, causal=True)
        varlen = partial(
            fa3.flash_attn_varlen_func, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=length, max_seqlen_k=length, causal=True,
        )  # fmt: skip
        found["FlashAttention-3, one document"] = Candidate(dense, "batch tokens heads", has_backward=False)
        found[f"FlashAttention-3, {several}"] = Candidate(varlen, "tokens heads", has_backward=False)
    return found


def measure(chosen: Mapping[str, Candidate], shape: Shape, rounds: int, calls: int) -> list[Row]:
    """Measures each candidate's passes."""
    runs: dict[tuple[str, Pass], Call] = {}
    failed: list[Row] = []
    for name, candidate in chosen.items():
        try:
            prepared = candidate.calls(shape, torch.device("cuda"), torch.bfloat16)
            with candidate.setting():
                for direction, run in prepared.items():
                    with grad_mode(direction):
                        for _ in range(WARM_UP):
                            run()
        except Exception as error:
            traceback.print_exc()
            failed.append(Row(name, "forward", first_line(error)))
        else:
            runs |= {(name, direction): run for direction, run in prepared.items()}
    samples: dict[tuple[str, Pass], list[Sample]] = {place: [] for place in runs}
    for name, direction in order([*runs], rounds):
        with chosen[name].setting(), grad_mode(direction):
            samples[name, direction].append(sample(runs[name, direction], calls, CALLS[direction]))
    return [Row.of(*place, found) for place, found in samples.items()] + failed


def order(places: Sequence[Any], rounds: int) -> list[Any]:
    """Returns `rounds` copies of the list `places`, each in a random order that is the same in every process."""
    generator = random.Random(0)
    return [place for _ in range(rounds) for place in generator.sample(places, len(places))]


def sample(run: Call, calls: int, in_a_row: int = 1) -> Sample:
    """Calls `run` until at least `calls` attention calls are made, and returns the sample.

    One call of `run` makes `in_a_row` attention calls.
    """
    runs = -(-calls // in_a_row)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in repeat(None, runs):
        run()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return Sample((end - start) / (runs * in_a_row) * 1e6, (time.perf_counter() - end) / (end - start))


def markdown(rows: Sequence[Row], shape: Shape, args: argparse.Namespace, head: Mapping[str, str]) -> str:
    """Formats the page: its header, and a table with a line per candidate and a column per pass."""
    lines = [
        *header("Host time of an attention call", head),
        f"{shape.tokens} tokens, {shape.n_heads} heads for {shape.n_kv_heads}, head_dim {shape.head_dim}, bf16, "
        f"causal. A cell is the median of {args.rounds} means of {args.calls} calls (lowest to highest) in "
        f"microseconds. GPU-bound: the GPU had work left for more than {GPU_BOUND:.0%} of that time.",
        "",
        f"| candidate | {' | '.join(CALLS)} |",
        "|:--|" + "--:|" * len(CALLS),
    ]
    cells = {(row.candidate, row.direction): _cell(row) for row in rows}
    for name in dict.fromkeys(row.candidate for row in rows):
        lines.append(f"| {name} | {' | '.join(cells.get((name, direction), '–') for direction in CALLS)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if row.median_us is None:
        return row.outcome
    time_us = f"{row.median_us:.1f} ({row.lowest_us:.1f} to {row.highest_us:.1f})"
    return time_us if row.outcome == "ok" else f"{row.outcome}: {time_us}"


def host() -> str:
    """Returns a text with the host's CPU, the load of the host and the Python version."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    model, *_ = models or [platform.machine()]
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help=f"number of tokens, a multiple of {DOCUMENTS}")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="number of samples of each pass")
    parser.add_argument("--calls", type=int, default=200, help="number of calls per sample")
    add_results(parser, "scripts/results/host_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    if args.tokens < DOCUMENTS or args.tokens % DOCUMENTS:
        parser.error(f"--tokens must be a multiple of {DOCUMENTS}; got {args.tokens}")
    if args.kv_heads < 1 or args.heads < 1 or args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads; got {args.heads} and {args.kv_heads}")
    if not 1 <= args.head_dim <= 256:
        parser.error(f"--head-dim must be from 1 to 256; got {args.head_dim}")
    require_positive(parser, args, ("rounds",))
    if not 1 <= args.calls <= MOST_CALLS:  # more calls could fill the launch queue of a slower GPU and block the host
        parser.error(f"--calls must be from 1 to {MOST_CALLS}; got {args.calls}")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.host")
    out = results_prefix(args.out, "host")
    head = describe("-m scripts.bench.host", args.commit)
    head["host"] = host()
    shape = Shape(args.tokens, args.heads, args.kv_heads, args.head_dim)
    rows = measure(candidates(shape, torch.device("cuda")), shape, args.rounds, args.calls)
    table = markdown(rows, shape, args, head)
    print(table)
    write_csv(Row, rows, Path(f"{out}.csv"))
    Path(f"{out}.md").write_text(table, encoding="utf-8")
    print(f"results: {out}.*")


if __name__ == "__main__":
    main()
