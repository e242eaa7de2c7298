"""Measures the cost of each attention feature relative to plain causal attention (python -m scripts.bench.features).

The script times the forward and the backward of flash_attn_varlen_func on one long row (64k tokens by default) in bf16.
The times include building the attention schedule. The column `work` is the number of visible (query, key) pairs,
relative to plain causal attention. The column `cost` is the time, relative to plain causal attention. For a window and
for packed documents, `cost` should be close to `work`. For a feature that changes scores (such as ALiBi), `cost` should
be close to 1. With fp8 inputs or a paged cache, only the forward pass is timed. Writes OUT.md.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa_kernels import flash_attn_varlen_func
from scripts.bench.attention import attended_pairs, fill_row
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.decode import in_pages
from scripts.bench.page import first_line, header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import captured, median_ms, require_gpu

Run = Callable[[], object]
LOG_NORMAL = (6.93, 1.3)  # mean and standard deviation of log(document length); the median is 1k tokens
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class Feature:
    """One line of the table: the document lengths, and additional arguments of flash_attn_varlen_func."""

    name: str
    lengths: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    n_kv_heads: int | None = None  # None: as many KV heads as query heads
    v_head_dim: int | None = None  # None: equal to head_dim
    fp8: bool = False  # q, k and v in e4m3 with one scale per KV head
    page_size: int = 0  # tokens per page, or 0 without a paged cache; with pages, documents need equal lengths

    @property
    def has_backward(self) -> bool:
        """fp8 inputs and paged caches have no backward pass."""
        return not self.fp8 and not self.page_size

    @property
    def pairs(self) -> int:
        if not self.arguments["causal"]:
            return sum(length**2 for length in self.lengths)
        left, _ = self.arguments.get("window_size", (-1, 0))
        return attended_pairs(self.lengths, None if left < 0 else left + 1)


def log_normal_lengths(total: int) -> tuple[int, ...]:
    """Returns random document lengths that add up to `total` tokens."""
    generator, (mean, deviation) = torch.Generator().manual_seed(0), LOG_NORMAL
    drawn = (int(torch.exp(mean + deviation * torch.randn((), generator=generator))) for _ in count())
    return fill_row((min(max(16, length), 32768) for length in drawn), total)


def features(seqlen: int, n_heads: int, head_dim: int, window: int) -> list[Feature]:
    """Returns plain causal attention first, and then the features to compare with it."""
    one, documents = (seqlen,), log_normal_lengths(seqlen)
    causal: dict[str, Any] = {"causal": True}
    slopes = torch.linspace(0.001, 0.1, len(documents) * n_heads).view(-1, n_heads)
    narrow = [Feature("values of 128 columns", one, causal, v_head_dim=128)] if head_dim == 192 else []
    return [
        Feature("causal", one, causal),
        Feature("not causal", one, {"causal": False}),
        Feature(f"window of {window}", one, causal | {"window_size": (window, 0)}),
        Feature("packed, log-normal lengths", documents, causal),
        Feature("packed, equal documents of 2048", (2048,) * (seqlen // 2048), causal),
        Feature("grouped heads, 4 to 1", one, causal, n_kv_heads=n_heads // 4),
        Feature("one KV head", one, causal, n_kv_heads=1),
        Feature("soft cap of 30", one, causal | {"softcap": 30.0}),
        Feature("sinks", one, causal | {"sinks": torch.zeros(n_heads)}),
        Feature("ALiBi", one, causal | {"alibi_slopes": torch.linspace(0.001, 0.1, n_heads)}),
        Feature("packed, log-normal, ALiBi by document", documents, causal | {"alibi_slopes": slopes}),
        Feature("fp32 output", one, causal | {"out_dtype": torch.float32}),
        Feature("gradient through lse", one, causal | {"return_lse": True}),
        Feature("deterministic", one, causal | {"deterministic": True}),
        *narrow,
        Feature("fp8 (e4m3, one scale per head)", one, causal, fp8=True),
        Feature("pages of 256, copied end to end", one, causal, page_size=256),
    ]


class Inputs:
    """Creates random tensors of shape (total, heads, head_dim).

    To save memory, all features share the tensors that have the same name and shape.

    Keep this object alive as long as the CUDA graphs, because a graph keeps addresses instead of tensors.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._tensors: dict[tuple[str, int, int, int], Tensor] = {}

    def __call__(self, name: str, total: int, heads: int, head_dim: int) -> Tensor:
        key = name, total, heads, head_dim
        if key not in self._tensors:
            drawn = torch.randn(total, heads, head_dim, device=self.device, dtype=self.dtype)
            self._tensors[key] = drawn.requires_grad_(name != "do")
        return self._tensors[key]


def gpu_inputs() -> Inputs:
    return Inputs(torch.device("cuda"), torch.bfloat16)


def in_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Converts x (total, heads, head_dim) to e4m3. Also returns the scale of each KV head, (heads / group,) fp32."""
    x = x.detach().float().unflatten(1, (-1, group))
    scale = x.abs().amax((0, 2, 3)) / FP8_MAX
    return (x / scale[:, None, None]).flatten(1, 2).to(FP8), scale


def attention(feature: Feature, inputs: Inputs, n_heads: int, head_dim: int) -> partial[Any]:
    """Returns the forward pass of a feature as a functools.partial, which has q, k and v as its first arguments."""
    total = sum(feature.lengths)
    n_kv_heads, v_head_dim = feature.n_kv_heads or n_heads, feature.v_head_dim or head_dim
    q = inputs("q", total, n_heads, head_dim)
    k, v = inputs("k", total, n_kv_heads, head_dim), inputs("v", total, n_kv_heads, v_head_dim)
    cu_seqlens = torch.tensor([0, *feature.lengths]).cumsum(0).to(inputs.device, torch.int32)
    longest = max(feature.lengths)
    arguments = {name: x.to(inputs.device) if isinstance(x, Tensor) else x for name, x in feature.arguments.items()}
    if feature.fp8:
        q, arguments["q_descale"] = in_fp8(q, n_heads // n_kv_heads)
        k, arguments["k_descale"] = in_fp8(k, 1)
        v, arguments["v_descale"] = in_fp8(v, 1)
    if feature.page_size:
        order = torch.randperm(total // feature.page_size, device=inputs.device)
        q = q.detach()
        k, v = (in_pages(x.detach(), feature.page_size, order) for x in (k, v))
        arguments["block_table"] = order.to(torch.int32).view(len(feature.lengths), -1)
    function: Any = flash_attn_varlen_func  # Any, because the type checker cannot know what the call returns
    return partial(function, q, k, v, cu_seqlens, cu_seqlens, longest, longest, **arguments)


def gradients(feature: Feature, inputs: Inputs, n_heads: int, head_dim: int) -> Run:
    """Runs the forward pass and returns the backward pass as a callable."""
    attend = attention(feature, inputs, n_heads, head_dim)
    outputs = attend()
    o, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    of_outputs = (inputs("do", *o.shape).to(o.dtype), *map(torch.ones_like, others))
    return partial(torch.autograd.grad, (o, *others), attend.args[:3], of_outputs, retain_graph=True)


def compile_one(args: argparse.Namespace, case: tuple[int, int]) -> str:
    """Compiles the forward and backward kernels of a feature into Triton's cache.

    Returns the first line of the error message if a kernel fails, or else an empty string.

    case: (index of the feature, head_dim). The inputs have full size, because their size determines which kernels run.
    """
    place, head_dim = case
    feature = features(args.seqlen, args.heads, head_dim, args.window)[place]
    try:
        prepare = gradients if feature.has_backward else attention
        prepare(feature, gpu_inputs(), args.heads, head_dim)()
        torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return first_line(error)
    finally:
        torch.cuda.empty_cache()  # frees GPU memory for the other processes
    return ""


def compile_all(args: argparse.Namespace) -> dict[tuple[int, int], str]:
    """Compiles the kernels of all features in --jobs processes.

    Returns {(index of the feature, head_dim): error or an empty string}.
    """
    # Neighbouring cases are usually one feature with different head_dims. Different head_dims need different kernels,
    # so concurrent processes rarely compile the same kernel.
    cases = sorted(
        (place, d) for d in args.head_dims for place in range(len(features(args.seqlen, args.heads, d, args.window)))
    )
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        return dict(zip(cases, pool.map(partial(compile_one, args), cases, chunksize=1), strict=True))


def measure(
    chosen: list[Feature], n_heads: int, head_dim: int, rep: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the milliseconds of each feature: one dictionary for the forward pass, and one for the backward pass.

    With 16 heads, head_dim 256 and 64k tokens, q takes 0.5 GiB of memory, and all inputs together take about 4 GiB.
    Each backward CUDA graph takes about 4 GiB for o, dq, dk, dv and an fp32 dq. The graphs of 14 features take 56 GiB.
    """
    inputs = gpu_inputs()
    forward = timed({f.name: partial(attention, f, inputs, n_heads, head_dim) for f in chosen}, rep)
    trained = [f for f in chosen if f.has_backward]
    return forward, timed({f.name: partial(gradients, f, inputs, n_heads, head_dim) for f in trained}, rep)


def timed(prepare: Mapping[str, Callable[[], Run]], rep: float) -> dict[str, float]:
    """Captures each prepared function as a CUDA graph, and returns its median milliseconds."""
    runs: dict[str, Run] = {}
    for name, prepare_one in prepare.items():
        runs[name] = captured(prepare_one)
        torch.cuda.empty_cache()  # frees the memory of the warm-up call in `captured`
    return median_ms(runs, rep=rep)


def rows(
    chosen: list[Feature], head_dim: int, forward: dict[str, float], backward: dict[str, float], errors: dict[str, str]
) -> list[str]:
    """Returns the table lines for one head_dim."""
    plain, *_ = chosen
    lines: list[str] = []
    for feature in chosen:
        cells = [str(head_dim), feature.name, f"{feature.pairs / plain.pairs:.3f}"]
        if feature.name in errors:
            cells += [errors[feature.name], "", "", ""]
        else:
            for ms in (forward, backward):
                known = feature.name in ms
                cells += (
                    [f"{ms[feature.name]:.3f}", f"{ms[feature.name] / ms[plain.name]:.3f}"] if known else ["–", "–"]
                )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65536, help="tokens")
    parser.add_argument("--window", type=int, default=4096, help="tokens to the left in a window")
    parser.add_argument("--heads", type=int, default=16, help="number of query heads, a multiple of 4")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 96, 128, 192, 256])
    parser.add_argument("--rep", type=float, default=100, help="total milliseconds per feature")
    parser.add_argument(
        "--jobs", type=int, default=min(15, os.cpu_count() or 1), help="number of processes that compile kernels"
    )
    add_results(parser, "scripts/results/features_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    if args.heads < 4 or args.heads % 4:
        parser.error(f"--heads must be a multiple of 4; got {args.heads}")
    if args.seqlen < 2048 or args.seqlen % 2048:
        parser.error(f"--seqlen must be a multiple of 2048; got {args.seqlen}")
    require_positive(parser, args, ("jobs", "rep"))
    if not all(8 <= head_dim <= 256 and head_dim % 8 == 0 for head_dim in args.head_dims):
        parser.error(f"--head-dims must be multiples of 8 from 8 to 256; got {args.head_dims}")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.features")
    out = results_prefix(args.out, "features")
    head = describe("-m scripts.bench.features", args.commit)
    lines = [
        *header("The cost of each feature relative to plain causal attention", head),
        f"{args.seqlen} tokens, {args.heads} heads, bf16; work and cost are relative to plain causal attention.",
        "",
        "| d | feature | work | forward ms | cost | backward ms | cost |",
        "|--:|:--|--:|--:|--:|--:|--:|",
    ]
    started = time.monotonic()
    errors = compile_all(args)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    for head_dim in args.head_dims:
        chosen = features(args.seqlen, args.heads, head_dim, args.window)
        failed = {f.name: errors[place, head_dim] for place, f in enumerate(chosen) if errors[place, head_dim]}
        if chosen[0].name in failed:
            sys.exit(f"plain causal attention of head_dim {head_dim} failed: {failed[chosen[0].name]}")
        forward, backward = measure([f for f in chosen if f.name not in failed], args.heads, head_dim, args.rep)
        found = rows(chosen, head_dim, forward, backward, failed)
        print("\n".join(found), flush=True)
        lines += found
        Path(f"{out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"results: {out}.md")


if __name__ == "__main__":
    main()
