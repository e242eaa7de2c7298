"""Measures flash_attn_with_kvcache with one new token per sequence (python -m scripts.bench.decode).

Each cell of the table shows the microseconds of a call, and the GB/s at which the call reads K and V. For a dense
cache, the table has three columns: our kernel with an automatic number of splits, our kernel with one split, and SDPA.
A split is a part of the keys that one program reads. For paged caches, the results table has one column per page
size. The caches are full and hold bf16. The candidates in a table line run as CUDA graphs, in random order and with a
cold L2 cache (see scripts/bench/timing.py). Writes OUT.md.

    python -m scripts.bench.decode --cases 1,32,8,128,8192 64,32,8,128,4096     # batch,heads,KV heads,head_dim,cache
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fa_kernels import flash_attn_with_kvcache
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import captured, median_ms, require_gpu

Run = Callable[[], object]
PAGES = (256, 16)  # tokens per page
ITEM = 2  # bytes of bf16


@dataclass(frozen=True)
class Case:
    """One decoding step: one query per sequence, and caches of `cache` tokens."""

    batch: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    cache: int

    @property
    def bytes_read(self) -> int:
        return 2 * self.batch * self.cache * self.n_kv_heads * self.head_dim * ITEM


CASES = (
    Case(1, 32, 8, 128, 8192),
    Case(1, 32, 8, 128, 131072),
    Case(1, 32, 32, 128, 32768),
    Case(16, 32, 8, 128, 8192),
    Case(64, 32, 8, 128, 4096),
    Case(16, 32, 1, 128, 16384),
    Case(16, 16, 8, 96, 8192),
    Case(16, 16, 8, 192, 8192),
    Case(1, 16, 2, 256, 32768),
    Case(8, 24, 24, 64, 8192),
)


def candidates(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, partial[Any]]:
    """Returns one function for each column of the table. Each function runs one decoding step."""
    q = torch.randn(case.batch, 1, case.n_heads, case.head_dim, device=device, dtype=dtype)
    k, v = (
        torch.randn(case.batch, case.cache, case.n_kv_heads, case.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )
    held = torch.full((case.batch,), case.cache, dtype=torch.int32, device=device)
    step: Any = partial(flash_attn_with_kvcache, cache_seqlens=held, causal=True)
    runs: dict[str, partial[Any]] = {
        "automatic": partial(step, q, k, v),
        "1 split": partial(step, q, k, v, num_splits=1),
    }
    for page_size in PAGES:
        order = torch.randperm(case.batch * case.cache // page_size, device=device)
        table = order.to(torch.int32).view(case.batch, -1)
        pages = in_pages(k, page_size, order), in_pages(v, page_size, order)
        runs[f"pages of {page_size}"] = partial(step, q, *pages, block_table=table)
    # SDPA needs the shape (batch, heads, tokens, head_dim), but accepts any memory layout
    q_t, k_t, v_t = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = case.n_heads != case.n_kv_heads
    runs["SDPA"] = partial(scaled_dot_product_attention, q_t, k_t, v_t, enable_gqa=grouped)
    return runs


def in_pages(x: Tensor, page_size: int, order: Tensor) -> Tensor:
    """Splits x into pages: (..., tokens, heads, head_dim) -> (pages, page_size, heads, head_dim).

    Page number `i` of x becomes page number `order[i]` of the result.
    """
    pages = torch.empty(order.numel(), page_size, *x.shape[-2:], dtype=x.dtype, device=x.device)
    pages[order] = x.reshape(pages.shape)
    return pages


def compile_one(case: Case) -> None:
    """Compiles every candidate of the case into Triton's cache."""
    for run in candidates(case, torch.device("cuda"), torch.bfloat16).values():
        run()
    torch.cuda.synchronize()


def measure(case: Case, rep: float) -> dict[str, float]:
    """Returns the microseconds per call of each candidate."""
    runs = candidates(case, torch.device("cuda"), torch.bfloat16)
    milliseconds = median_ms({name: replayed(run) for name, run in runs.items()}, rep=rep)
    return {name: 1e3 * ms for name, ms in milliseconds.items()}


def replayed(run: Run) -> Run:
    return captured(lambda: run)


def markdown(results: dict[Case, dict[str, float]], head: dict[str, str]) -> str:
    """Formats the page: its header and one table line for each case."""
    lines = [
        *header("Decoding one token from a cache", head),
        "bf16, full caches, one query per sequence. Columns are `flash_attn_with_kvcache`, except SDPA (`enable_gqa`). "
        "Times are medians in random order, replayed as CUDA graphs with a cold L2 cache. A cell is microseconds · "
        "GB/s of K and V. `automatic` (the default `num_splits`), `1 split` and SDPA use a dense cache; pages are "
        "in any order.",
        "",
    ]
    columns = list(next(iter(results.values()), {}))
    lines.append(f"| batch | heads | KV heads | d | cache | {' | '.join(columns)} |")
    lines.append("|" + "--:|" * (5 + len(columns)))
    for case, microseconds in results.items():
        cells = [f"{us:.1f} · {case.bytes_read / us / 1e3:.0f}" for us in microseconds.values()]
        lines.append(f"| {' | '.join(map(str, [*astuple(case), *cells]))} |")
    return "\n".join(lines) + "\n"


def parse_case(text: str) -> Case:
    """Parses batch,heads,KV heads,head_dim,cache."""
    try:
        case = Case(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be batch,heads,KV heads,head_dim,cache; got {text}") from None
    if min(astuple(case)) < 1 or case.head_dim > 256:
        raise argparse.ArgumentTypeError(f"values must be positive, and head_dim at most 256; got {text}")
    if case.n_heads % case.n_kv_heads:
        raise argparse.ArgumentTypeError(f"heads must be a multiple of KV heads; got {text}")
    if case.cache % max(PAGES):
        raise argparse.ArgumentTypeError(f"cache must be a multiple of {max(PAGES)} tokens; got {text}")
    return case


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=parse_case, nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--rep", type=float, default=20, help="total milliseconds per candidate of a case")
    parser.add_argument(
        "--jobs", type=int, default=min(15, os.cpu_count() or 1), help="number of processes that compile kernels first"
    )
    add_results(parser, "scripts/results/decode_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    require_positive(parser, args, ("jobs", "rep"))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.decode")
    out = results_prefix(args.out, "decode")
    head = describe("-m scripts.bench.decode", args.commit)
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(args.cases))) as pool:
        pool.map(compile_one, args.cases, chunksize=1)
    results: dict[Case, dict[str, float]] = {}
    for case in args.cases:
        results[case] = measure(case, args.rep)
        torch.cuda.empty_cache()  # frees the memory of the CUDA streams that captured this case
        print(markdown({case: results[case]}, {}).splitlines()[-1], flush=True)
        Path(f"{out}.md").write_text(markdown(results, head), encoding="utf-8")
    print(f"results: {out}.md")


if __name__ == "__main__":
    main()
