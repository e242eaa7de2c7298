"""Measures the time, TFLOP/s and peak memory of our attention and of other implementations.

    python -m scripts.bench.attention                                  # 1k to 64k tokens, d = 64 and 128, causal.
    python -m scripts.bench.attention --varlen --seqlens               # only packed documents.
    python -m scripts.bench.attention --backends naive ours --head-dims 128 --seqlens 4096 16384    # two backends.

Writes OUT.csv, OUT.md, OUT.png and OUT_rates.png. FlashAttention-3 (the package `fa3-fwd`, forward only) and
FlashAttention-4 (the package `flash-attn-4`) are measured if they are installed.

A forward pass has 4 * n_heads * head_dim * (sum of squared lengths) FLOPs, or half as many if attention is causal. A
backward pass has 2.5 times as many FLOPs as its forward pass. Peak memory leaves out the inputs (q, k, v and the
gradient of o), but includes masks and schedules. The peak memory of a backward pass includes the memory of its forward
pass. Each pass is replayed as a CUDA graph, so the times are GPU times without host time. Block masks and schedules are
built before the timing starts, except with the backend `ours`, which builds an attention schedule in every call.
"""

import argparse
import gc
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import build_schedule
from scripts.bench.attention_report import (
    DIRECTIONS,
    LARGE_GIB,
    MODEL_DIM,
    Direction,
    Row,
    cell,
    draw,
    draw_rates,
    markdown,
)
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.page import first_line, write_csv
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import captured, median_ms, require_gpu

BATCH_TOKENS = 16384
PACKED_TOKENS = 65536  # length of the row into which documents are packed
DEVICE = torch.device("cuda")
# modules with flash_attn_func and flash_attn_varlen_func; only some machines have fa3 and fa4
MODULES = {"ours": "fa_kernels", "fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """One problem: `batch` rows of `seqlen` tokens each."""

    head_dim: int
    batch: int
    seqlen: int
    causal: bool
    documents: tuple[int, ...] = ()  # lengths in tokens of the documents that share a single row
    name: str = ""
    group: int = 1  # number of query heads per KV head
    model_dim: int = MODEL_DIM

    @property
    def n_heads(self) -> int:
        return self.model_dim // self.head_dim // self.group * self.group

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.documents or (self.seqlen,) * self.batch

    @property
    def section(self) -> str:
        return "packed documents" if self.documents else "dense"

    def flops(self, direction: Direction) -> float:
        forward = (
            4 * self.n_heads * self.head_dim * sum(length**2 for length in self.lengths) / (2 if self.causal else 1)
        )
        return forward * (2.5 if direction == "backward" else 1)

    def cu_seqlens(self) -> Tensor:
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(device=DEVICE, dtype=torch.int32)


@dataclass(frozen=True)
class Backend:
    """One attention implementation.

    prepare: takes a workload, and returns a function that computes o from q, k and v.
    """

    layout: Literal["batch heads tokens", "batch tokens heads", "tokens heads"]
    prepare: Callable[[Workload], Attend]
    has_backward: bool = True

    def inputs(self, workload: Workload) -> list[Tensor]:
        """Returns q, k, v and the gradient of o in bf16.

        The tensors have the layout of the backend, so that no transposition is timed.
        """
        batch, tokens = workload.batch, workload.seqlen
        kv_heads = workload.n_heads // workload.group
        tensors = []
        for heads in (workload.n_heads, kv_heads, kv_heads, workload.n_heads):
            shape = {
                "batch heads tokens": (batch, heads, tokens),
                "batch tokens heads": (batch, tokens, heads),
                "tokens heads": (batch * tokens, heads),
            }[self.layout]
            tensors.append(torch.randn(*shape, workload.head_dim, dtype=torch.bfloat16, device=DEVICE))
        return [tensor.requires_grad_(self.has_backward) for tensor in tensors[:3]] + tensors[3:]


def naive(workload: Workload) -> Attend:
    """Textbook attention with scores in bf16, which need less memory than fp32 scores."""
    hidden = torch.ones(workload.seqlen, workload.seqlen, dtype=torch.bool, device=DEVICE).triu(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(workload.group, dim=1) for x in (k, v))
        scores = (q * workload.head_dim**-0.5) @ k.transpose(-2, -1)
        if workload.causal:
            scores.masked_fill_(hidden, -math.inf)
        return scores.softmax(-1) @ v

    return attend


def sdpa(backend: SDPBackend, workload: Workload) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=workload.causal, enable_gqa=workload.group > 1)

    return attend


def flex(workload: Workload) -> Attend:
    """FlexAttention, compiled for exactly this shape, as its authors recommend."""
    torch._dynamo.reset()  # each shape is compiled separately, and torch limits the number of compilations
    torch._functorch.config.donated_buffer = False  # the timing repeats the backward pass, so its buffers must be kept
    compiled = torch.compile(flex_attention, dynamic=False)
    causal = workload.causal
    attention = partial(compiled, enable_gqa=workload.group > 1)
    lengths = torch.tensor(workload.lengths, device=DEVICE)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)

    def causal_mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def document_mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document[query] == document[key]
        return same & (query >= key) if causal else same

    if not workload.documents and not causal:
        return attention
    mask = document_mask if workload.documents else causal_mask
    block_mask = create_block_mask(mask, None, None, workload.seqlen, workload.seqlen, device=DEVICE)
    return partial(attention, block_mask=block_mask)


def flash(name: str, workload: Workload) -> Attend:
    """Returns a function that calls flash_attn_func or flash_attn_varlen_func of a module in `MODULES`."""
    module = import_module(MODULES[name])
    if not workload.documents:
        return lambda q, k, v: output_of(module.flash_attn_func(q, k, v, causal=workload.causal))
    arguments = varlen_arguments(workload.cu_seqlens(), max(workload.lengths))
    return lambda q, k, v: output_of(module.flash_attn_varlen_func(q, k, v, **arguments, causal=workload.causal))


def varlen_arguments(cu_seqlens: Tensor, longest: int) -> dict[str, Any]:
    """Returns the arguments with which flash_attn_varlen_func gets the boundaries of documents.

    cu_seqlens: (documents + 1,) int32. longest: the number of tokens in the longest document.
    """
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest
    }  # fmt: skip


def output_of(result: Any) -> Tensor:
    """Returns o from the result of an attention function, which is o or a tuple that starts with o."""
    o: Tensor = result[0] if isinstance(result, tuple) else result
    return o


def ours_packed(workload: Workload) -> Attend:
    """Calls flash_attn_packed like a layer of a model: the schedule of the batch is built in advance."""
    cu_seqlens, total = workload.cu_seqlens(), sum(workload.lengths)
    schedule = build_schedule(
        cu_seqlens, cu_seqlens, total, total, causal=workload.causal, padded=False,
        seqlen=sum(n * n for n in workload.lengths) // total,
    )  # fmt: skip
    return partial(flash_attn_packed, schedule=schedule)


FLASH_BACKENDS = {
    "fa3": Backend("batch tokens heads", partial(flash, "fa3"), has_backward=False),
    "fa4": Backend("batch tokens heads", partial(flash, "fa4")),
    "ours": Backend("batch tokens heads", partial(flash, "ours")),
}
OURS_PACKED = {"ours-packed": Backend("tokens heads", ours_packed)}
DENSE_BACKENDS = {
    "naive": Backend("batch heads tokens", naive),
    "sdpa-flash2": Backend("batch heads tokens", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    "sdpa-cudnn": Backend("batch heads tokens", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    "flex": Backend("batch heads tokens", flex),
    **FLASH_BACKENDS,
    **OURS_PACKED,
}
PACKED_BACKENDS = {
    "flex": Backend("batch heads tokens", flex),
    **{name: replace(backend, layout="tokens heads") for name, backend in FLASH_BACKENDS.items()},
    **OURS_PACKED,
}


def dense_workload(
    seqlen: int,
    head_dim: int,
    *,
    causal: bool,
    group: int = 1,
    model_dim: int = MODEL_DIM,
    batch_tokens: int = BATCH_TOKENS,
) -> Workload:
    batch = max(1, batch_tokens // seqlen)
    return Workload(head_dim, batch, seqlen, causal, name=f"{batch} × {seqlen}", group=group, model_dim=model_dim)


def packed_workloads(
    head_dim: int, *, causal: bool, group: int = 1, model_dim: int = MODEL_DIM, total: int = PACKED_TOKENS
) -> list[Workload]:
    """Returns two workloads of packed documents: log-normal lengths like web text, and many short documents."""
    generator = torch.Generator().manual_seed(0)
    candidates = max(1, total // 64)
    # the median length is 1k tokens, and no document is longer than 32k
    long_tailed = torch.randn(candidates, generator=generator).mul(1.5).exp().mul(1024).long().clamp(1, 32768)
    short = torch.randint(64, 513, (candidates,), generator=generator)
    return [
        Workload(head_dim, 1, total, causal, documents, f"{len(documents)} documents, {kind}", group, model_dim)
        for kind, documents in (
            ("log-normal", fill_row(long_tailed.tolist(), total)),
            ("64 to 512 tokens", fill_row(short.tolist(), total)),
        )
    ]


def fill_row(lengths: Iterable[int], total: int) -> tuple[int, ...]:
    """Takes documents until they fill `total` tokens, and returns their lengths. The last document is cut to fit."""
    documents: list[int] = []
    left = total
    for length in lengths:
        if left == 0:
            break
        documents.append(min(length, left))
        left -= documents[-1]
    return tuple(documents)


def attended_pairs(lengths: Sequence[int], window: int | None) -> int:
    """Returns the number of visible (query, key) pairs in causal attention.

    window: the number of keys that a query sees at most, including its own key.
    """
    n = np.array(lengths, dtype=np.int64)
    outside = np.maximum(0, n - (window or n.max()))  # number of queries whose window hides earlier tokens
    return int((n * (n + 1) // 2 - outside * (outside + 1) // 2).sum())


def measure(backends: Mapping[str, Backend], workload: Workload, *, rep: float) -> list[Row]:
    """Measures the forward and backward pass of each backend.

    If the forward pass fails, the results of the forward and of the backward both show the error.
    """
    outcomes = dict.fromkeys(backends, "ok")
    results: dict[tuple[str, Direction], tuple[float, float]] = {}
    for direction in DIRECTIONS:
        runs: dict[str, Callable[[], object]] = {}
        peaks: dict[str, float] = {}
        for name, backend in backends.items():
            if outcomes[name] != "ok" or (direction == "backward" and not backend.has_backward):
                continue
            try:
                run, peak_gib = prepare_pass(backend, workload, direction)
                if peak_gib > LARGE_GIB:  # run the large CUDA graph now, and free its memory before other graphs run
                    results[name, direction] = median_ms({name: run}, rep=rep)[name], peak_gib
                else:
                    runs[name], peaks[name] = run, peak_gib
                del run
            except torch.OutOfMemoryError:
                outcomes[name] = "oom"
            except Exception as error:
                traceback.print_exc()
                outcomes[name] = first_line(error)
            gc.collect()  # reference cycles keep tensors of a failed pass alive
            torch.cuda.empty_cache()
        for name, ms in median_ms(runs, rep=rep).items():
            results[name, direction] = ms, peaks[name]
    shape = (workload.head_dim, workload.group, workload.batch, workload.seqlen, workload.causal)
    rows: list[Row] = []
    for name, backend in backends.items():
        for direction in DIRECTIONS if backend.has_backward else DIRECTIONS[:1]:
            place = (workload.section, workload.name, *shape, name, direction)
            if (name, direction) in results:
                ms, peak_gib = results[name, direction]
                rows.append(Row(*place, "ok", ms, workload.flops(direction) / ms * 1e-9, peak_gib))
            else:
                rows.append(Row(*place, outcomes[name], None, None, None))
    return rows


def prepare_pass(backend: Backend, workload: Workload, direction: Direction) -> tuple[Callable[[], object], float]:
    """Returns a function that replays one pass, and the peak memory of the pass without its inputs, in GiB."""
    q, k, v, do = backend.inputs(workload)
    inputs_bytes = torch.cuda.memory_allocated()
    attend = backend.prepare(workload)

    def run() -> None:
        o = attend(q, k, v)
        if direction == "backward":
            torch.autograd.grad(o, (q, k, v), do)

    run()  # this run is not measured, because it compiles kernels, which needs additional memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak_gib = (torch.cuda.max_memory_allocated() - inputs_bytes) / 2**30

    def prepare() -> Callable[[], object]:
        if direction == "forward":
            return run
        return partial(torch.autograd.grad, attend(q, k, v), (q, k, v), do, retain_graph=True)

    return captured(prepare), peak_gib


def installed(backend: str) -> bool:
    """Returns whether Python finds the module of a backend.

    If the import of the module's parent package fails, the function returns False.
    """
    try:
        return find_spec(MODULES.get(backend, "torch")) is not None
    except ImportError:
        return False


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seqlens",
        type=int,
        nargs="*",
        default=[2**n for n in range(10, 17)],
        help="lengths in tokens of dense workloads; without a value, dense workloads are not measured",
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1], help="query heads per KV head")
    parser.add_argument("--model-dim", type=int, default=MODEL_DIM, help="upper limit of n_heads * head_dim")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens per batch of short sequences")
    parser.add_argument("--backends", nargs="+", choices=DENSE_BACKENDS, help="default: all that are installed")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--varlen", action="store_true", help="also measure packed documents")
    parser.add_argument("--packed-tokens", type=int, default=PACKED_TOKENS, help="tokens of the packed documents")
    parser.add_argument("--rep", type=float, default=60, help="total milliseconds per backend")
    add_results(parser, "scripts/results/attention_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    if not all(0 < head_dim <= 256 for head_dim in args.head_dims):
        parser.error(f"--head-dims must be from 1 to 256; got {args.head_dims}")
    most = args.model_dim // max(args.head_dims)
    if most < 1:
        parser.error(
            f"--model-dim must be at least the largest of --head-dims, {max(args.head_dims)}; got {args.model_dim}"
        )
    require_positive(parser, args, ("batch_tokens", "packed_tokens", "seqlens"))
    if not all(0 < group <= most for group in args.groups):
        parser.error(f"--groups must be from 1 to {most}, the number of query heads; got {args.groups}")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.attention")
    out = results_prefix(args.out, "attention")
    chosen = args.backends or [name for name in DENSE_BACKENDS if installed(name)]

    shapes = [(head_dim, group) for head_dim in args.head_dims for group in args.groups]
    given = {"causal": args.causal, "model_dim": args.model_dim}
    workloads = [
        dense_workload(n, d, group=g, batch_tokens=args.batch_tokens, **given) for d, g in shapes for n in args.seqlens
    ]
    if args.varlen:
        workloads += [w for d, g in shapes for w in packed_workloads(d, group=g, total=args.packed_tokens, **given)]
    rows: list[Row] = []
    for workload in workloads:
        backends = PACKED_BACKENDS if workload.documents else DENSE_BACKENDS
        for row in measure({name: backends[name] for name in chosen if name in backends}, workload, rep=args.rep):
            rows.append(row)
            place = f"d={row.head_dim} group={row.group} {row.workload}"
            print(f"{place} {row.backend} {row.direction}: {cell(row)}", flush=True)
        write_csv(Row, rows, Path(f"{out}.csv"))

    head = describe("-m scripts.bench.attention", args.commit)
    Path(f"{out}.md").write_text(markdown(rows, head, args.model_dim), encoding="utf-8")
    if 1 in args.groups:  # the plots only show results with as many KV heads as query heads
        mask = "causal" if args.causal else "not causal"
        size = f"n_heads × head_dim = {args.model_dim}, at least {args.batch_tokens} tokens per batch"
        title = f"{head['GPU']}, bf16, {mask}, {size}"
        draw_rates(rows, title).savefig(f"{out}_rates.png", dpi=150)
        if args.seqlens:
            draw(rows, title).savefig(f"{out}.png", dpi=150)
    print(f"results: {out}.*")


if __name__ == "__main__":
    main()
