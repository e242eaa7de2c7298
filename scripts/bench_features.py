"""What each feature of our attention costs beside plain causal attention: python -m scripts.bench_features

One long row (64k tokens by default), bf16, both passes through flash_attn_varlen_func with the schedule built inside.
`work` is the share of plain causal's visible pairs that a feature leaves; `cost` is the share of its time. A window or
packed documents should cost about their share of the work, a feature of the scores about 1. Writes OUT.md.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import flash_attn_varlen_func
from scripts.bench_attention import describe
from scripts.gpu_timing import captured, median_ms

Run = Callable[[], object]
LOG_NORMAL = (6.93, 1.3)  # of document lengths: a median of 1k tokens


@dataclass(frozen=True)
class Feature:
    """One line of the table: documents' lengths, and what flash_attn_varlen_func is given beside them."""

    name: str
    lengths: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    n_kv_heads: int | None = None  # None is as many as query heads

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key."""
        left = self.arguments.get("window_size", (-1, 0))[0]
        return sum(visible_pairs(length, left, self.arguments["causal"]) for length in self.lengths)


def visible_pairs(length: int, left: int, causal: bool) -> int:
    """Of one document: all pairs, those up to the diagonal, or those of them at most `left` tokens back."""
    if not causal:
        return length * length
    if left < 0 or left >= length:
        return length * (length + 1) // 2
    return (left + 1) * (left + 2) // 2 + (length - left - 1) * (left + 1)


def log_normal_lengths(total: int) -> tuple[int, ...]:
    """Documents that fill `total` tokens, the same every time."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        mean, deviation = LOG_NORMAL
        drawn = int(torch.exp(mean + deviation * torch.randn((), generator=generator)))
        lengths.append(min(max(16, drawn), 32768, total - sum(lengths)))
    return tuple(lengths)


def features(seqlen: int, n_heads: int, window: int) -> Iterator[Feature]:
    """Plain causal attention first, then one change each."""
    one = (seqlen,)
    yield Feature("causal", one, {"causal": True})
    yield Feature("not causal", one, {"causal": False})
    yield Feature(f"window of {window}", one, {"causal": True, "window_size": (window, 0)})
    yield Feature("packed, log-normal lengths", log_normal_lengths(seqlen), {"causal": True})
    yield Feature("packed, equal documents of 2048", (2048,) * (seqlen // 2048), {"causal": True})
    yield Feature("grouped heads, 4 to 1", one, {"causal": True}, n_kv_heads=n_heads // 4)
    yield Feature("one KV head", one, {"causal": True}, n_kv_heads=1)
    yield Feature("soft cap of 30", one, {"causal": True, "softcap": 30.0})
    yield Feature("sinks", one, {"causal": True, "sinks": torch.zeros(n_heads)})
    yield Feature("ALiBi", one, {"causal": True, "alibi_slopes": torch.linspace(0.001, 0.1, n_heads)})
    yield Feature("fp32 output", one, {"causal": True, "out_dtype": torch.float32})
    yield Feature("deterministic", one, {"causal": True, "deterministic": True})


def passes(feature: Feature, n_heads: int, head_dim: int) -> tuple[Run, Run]:
    """What replays the forward, and the backward."""
    total = sum(feature.lengths)
    q, k, v = (
        torch.randn(total, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (n_heads, feature.n_kv_heads or n_heads, feature.n_kv_heads or n_heads)
    )
    cu_seqlens = torch.tensor([0, *feature.lengths]).cumsum(0).to("cuda", torch.int32)
    longest = max(feature.lengths)
    arguments = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in feature.arguments.items()}
    function: Any = flash_attn_varlen_func  # its result's type depends on arguments that are not known here
    attend = partial(function, q, k, v, cu_seqlens, cu_seqlens, longest, longest, **arguments)
    do = torch.randn_like(attend())
    forward = captured(lambda: attend)
    backward = captured(lambda: partial(torch.autograd.grad, attend(), (q, k, v), do, retain_graph=True))
    return forward, backward


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65536, help="tokens")
    parser.add_argument("--window", type=int, default=4096, help="tokens to the left")
    parser.add_argument("--heads", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rep", type=float, default=200, help="milliseconds each feature runs in all")
    parser.add_argument("--commit", help="for the head of the table, where the files are a copy without git")
    parser.add_argument("--out", type=Path, help="prefix of the results; scripts/results/features_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    if args.heads < 4 or args.heads % 4:
        parser.error(f"--heads must be a multiple of 4; got {args.heads}")
    if args.seqlen < 2048 or args.seqlen % 2048:
        parser.error(f"--seqlen must be a multiple of 2048; got {args.seqlen}")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if not torch.cuda.is_available():
        sys.exit("bench_features needs a CUDA GPU; torch sees none on this machine")
    today = date.today()
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    out: Path = args.out or Path(__file__).parent / "results" / f"features_{gpu}_{today:%Y%m}"
    head = describe(shlex.join(["python", "-m", "scripts.bench_features", *sys.argv[1:]]), args.commit, today)
    lines = ["# What each feature costs beside plain causal attention", "", *(f"- {k}: `{v}`" for k, v in head.items())]
    lines += ["", f"{args.seqlen} tokens, {args.heads} heads, bf16; work and cost are shares of plain causal's.", ""]
    lines += ["| d | feature | work | forward ms | cost | backward ms | cost |", "|--:|:--|--:|--:|--:|--:|--:|"]
    for head_dim in args.head_dims:
        chosen = list(features(args.seqlen, args.heads, args.window))
        plain, *_ = chosen
        forwards: dict[str, Run] = {}
        backwards: dict[str, Run] = {}
        for feature in chosen:
            forwards[feature.name], backwards[feature.name] = passes(feature, args.heads, head_dim)
        forward, backward = (median_ms(runs, rep=args.rep) for runs in (forwards, backwards))
        for feature in chosen:
            costs = [f"{ms[feature.name]:.3f} | {ms[feature.name] / ms[plain.name]:.3f}" for ms in (forward, backward)]
            lines.append(f"| {head_dim} | {feature.name} | {feature.pairs / plain.pairs:.3f} | {' | '.join(costs)} |")
            print(lines[-1], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"results: {out}.md")


if __name__ == "__main__":
    main()
