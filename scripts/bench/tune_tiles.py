"""Measures tiles for the portable kernels on the GPU of this machine, and writes the best tiles to a file.

    python -m scripts.bench.tune_tiles                                         # every head_dim and pass of the table.
    python -m scripts.bench.tune_tiles --near                                  # only tiles near the table's tiles.
    python -m scripts.bench.tune_tiles --near --install                        # fa_kernels then uses the best tiles.
    python -m scripts.bench.tune_tiles --head-dims 192 --passes dkdv dq        # two passes of one head_dim.
    python -m scripts.bench.tune_tiles --head-dims 128 --passes fwd --tiles 128,64,8,3 128,128,8,2    # two candidates.
    python -m scripts.bench.tune_tiles --dtype float32 --head-dims 64 128       # fp32.

A candidate is a combination of block_m, block_n, warps and stages, where block_m and block_n are powers of two. A
candidate must fit in shared memory (tiles.shared_bytes), and its fp32 tiles must leave registers for other values. With
--near, the script tries only the table's entry and the candidates that differ from this entry by one step in one value.
The script times the candidates one by one on a causal document of --seqlen tokens, with n_heads * head_dim = 2048 or
slightly less. The TFLOP/s are computed from 2 matmuls for the forward, 4 for dkdv, 3 for dk, 2 for dv and 3 for dq.
Causality halves the FLOPs. If two kernels for dK and dV are together faster than one, add the entries dk and dv to the
table instead of dkdv. With --dtype float32, the script tunes the entries for 4-byte dtypes, where each product is three
TF32 matmuls. A candidate counts only if its results are correct (`check`). Writes OUT.md: its header, a table for each
head_dim and pass, and the entries for tiles.py. The fastest tiles are added to OUT.json. fa_kernels loads OUT.json if
the environment variable FLASH_ATTENTION_TILES names it. With --install, the script also adds the fastest tiles to a
file in the user's cache folder (tuned_tiles.installed_file). fa_kernels loads the file in the cache folder if
FLASH_ATTENTION_TILES is not set.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from triton.testing import do_bench

from fa_kernels.device import Arch, arch_of, shared_memory
from fa_kernels.flash_attention import tuned_tiles
from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.portable import backward, forward
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_kernels.flash_attention.tiles import HEAD_DIMS, Pass, TileConfig, key_passes, shared_bytes, tile_config
from scripts.bench.attention import MODEL_DIM
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.page import first_line, header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu

CHECKED_TOKENS = 384  # length in tokens of the document for checks of candidates: three times the largest block size
Dtype = Literal["bfloat16", "float32"]
ITEMSIZE: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}
PASSES: tuple[Pass, ...] = get_args(Pass)
PRODUCTS = {"fwd": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}
APART: tuple[Pass, ...] = ("dk", "dv")  # replace dkdv
BLOCKS, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3, 4)
# If head_dim is at least `WIDE`, registers limit the block sizes, so separate kernels for dK and dV can be faster. One
# stage can be faster than several, because two programs with one stage each can alternate on a multiprocessor.
WIDE, WIDE_STAGES = 192, (1, 2, 3)
# Maximum number of fp32 elements per thread in accumulators and scores. The best tiles on an H200 stay below this
# limit. A thread has 255 registers and needs some for addresses.
MAX_HELD = 224
# The kernels split each fp32 element into two TF32 halves, which doubles the shared memory. Products with the lower
# halves need additional accumulators in registers, so the limit for accumulators and scores is half of `MAX_HELD`.
BLOCKS_OF_4_BYTES, STAGES_OF_4_BYTES, MAX_HELD_OF_4_BYTES = (16, 32, 64, 128), (1, 2), MAX_HELD // 2


@dataclass(frozen=True)
class Candidate:
    head_dim: int
    direction: Pass
    tiles: TileConfig
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True)
class Result:
    """The median time of one candidate. If the candidate failed, ms is None and `error` gives the reason."""

    candidate: Candidate
    ms: float | None
    tflops: float | None
    error: str = ""


def candidates(
    arch: Arch, head_dim: int, direction: Pass, limit: int, dtype: Dtype = "bfloat16"
) -> Iterator[TileConfig]:
    """Yields the candidates for one table entry on a GPU with `limit` bytes of shared memory per program."""
    itemsize = ITEMSIZE[dtype]
    if direction in APART and (head_dim < WIDE or itemsize > 2):
        return
    stages = STAGES_OF_4_BYTES if itemsize > 2 else WIDE_STAGES if head_dim >= WIDE else STAGES
    blocks = BLOCKS_OF_4_BYTES if itemsize > 2 else BLOCKS
    most_held = MAX_HELD_OF_4_BYTES if itemsize > 2 else MAX_HELD
    for tiles in (TileConfig(*sizes) for sizes in product(blocks, blocks, WARPS, stages)):
        fits = shared_bytes(arch, tiles, head_dim, head_dim, direction, itemsize) <= limit
        enough = has_scores_for_threads(tiles) if itemsize > 2 else has_rows_for_warps(tiles, head_dim, direction)
        if fits and enough and held_a_thread(tiles, head_dim, direction) <= most_held:
            yield tiles


def has_rows_for_warps(tiles: TileConfig, head_dim: int, direction: Pass) -> bool:
    """Returns whether each warp has at least 16 rows, or at least 8 rows if head_dim is above `WIDE`.

    With 8 rows per warp, pairs of warps compute the same scores. If head_dim is above `WIDE`, warps may have 8 rows,
    because larger tiles often do not fit in registers or shared memory.
    """
    rows = tiles.block_n if direction in ("dkdv", *APART) else tiles.block_m
    return rows >= (8 if head_dim > WIDE else 16) * tiles.num_warps


def has_scores_for_threads(tiles: TileConfig) -> bool:
    """Returns whether a tile has at least one score for each thread.

    In fp32, tiles with 16 rows per warp often do not fit in registers or shared memory. With mma.sync, warps can split
    the columns of a tile instead of its rows.
    """
    return tiles.block_m * tiles.block_n >= 32 * tiles.num_warps


def near(arch: Arch, head_dim: int, direction: Pass, limit: int, dtype: Dtype = "bfloat16") -> Iterator[TileConfig]:
    """Yields the table's entry, and then the candidates that differ from that entry by one step in one value.

    If the table has no dk and dv entries for a head_dim, the search starts from the dk and dv entries of the next
    larger head_dim.
    """
    itemsize = ITEMSIZE[dtype]
    worthwhile = list(candidates(arch, head_dim, direction, limit, dtype))
    listed = [d for d in HEAD_DIMS if d >= head_dim and is_listed(arch, d, direction, itemsize)]
    if worthwhile and listed:
        entry = tile_config(arch, listed[0], direction, itemsize)
        yield entry
        yield from (tiles for tiles in worthwhile if one_step(tiles, entry))


def is_listed(arch: Arch, head_dim: int, direction: Pass, itemsize: int) -> bool:
    """Returns whether the tile table has this entry."""
    return direction not in APART or direction in key_passes(arch, head_dim, itemsize)


def one_step(tiles: TileConfig, entry: TileConfig) -> bool:
    """Returns whether `tiles` and `entry` differ in exactly one value, by one step.

    One step doubles or halves a block size or the number of warps, or changes the number of stages by one.
    """
    changed = [(a, b) for a, b in zip(astuple(tiles)[:3], astuple(entry)[:3], strict=True) if a != b]
    stages = abs(tiles.num_stages - entry.num_stages)
    if not changed:
        return stages == 1
    return stages == 0 and len(changed) == 1 and max(changed[0]) == 2 * min(changed[0])


def held_a_thread(tiles: TileConfig, head_dim: int, direction: Pass) -> int:
    """Returns the number of fp32 elements that a thread holds: output tiles, scores S and, in the backward pass, dP."""
    scores = tiles.block_m * tiles.block_n
    held = {
        "fwd": tiles.block_m * head_dim + scores,
        "dkdv": 2 * tiles.block_n * head_dim + 2 * scores,
        "dk": tiles.block_n * head_dim + 2 * scores,
        "dv": tiles.block_n * head_dim + scores,
        "dq": tiles.block_m * head_dim + 2 * scores,
    }[direction]
    return held // (32 * tiles.num_warps)


def inputs(candidate: Candidate, seqlen: int, n_heads: int, device: str = "cuda") -> list[Tensor]:
    """Returns random q, k, v and gradient of o, each (seqlen, n_heads, head_dim)."""
    dtype = torch.bfloat16 if candidate.dtype == "bfloat16" else torch.float32
    return [torch.randn(seqlen, n_heads, candidate.head_dim, dtype=dtype, device=device) for _ in range(4)]


def launcher(candidate: Candidate, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that launches only the candidate's kernel.

    In a backward pass, the function returns dq, dk and dv, but only the outputs of the candidate's kernel are valid.
    """
    (seqlen, _, head_dim), direction = q.shape, candidate.direction
    features = Features(head_dim**-0.5, softcap=0.0, sinks=None, alibi=[])
    schedule = causal_schedule(None, seqlen, q.device)

    def chosen(*_: object) -> TileConfig:
        return candidate.tiles

    def run_forward() -> Sequence[Tensor]:
        with patch.object(forward, "launch_tiles", chosen):
            return forward.attention_forward(q, k, v, schedule, features, q.dtype)

    if direction == "fwd":
        return run_forward
    o, lse = forward.attention_forward(q, k, v, schedule, features, q.dtype)
    delta = attention_delta(o, do, None)
    # The schedule `half` has tiles either for the kernels of dk and dv, or for the kernel of dq. attention_backward
    # launches only the kernels for which the schedule has tiles.
    none = schedule.key_tiles[:0]
    half = schedule._replace(key_tiles=none) if direction == "dq" else schedule._replace(query_tiles=none)

    def run_backward() -> Sequence[Tensor]:
        with (
            patch.object(backward, "launch_tiles", chosen),
            patch.object(backward, "key_passes", lambda *_: (direction,)),
        ):
            return backward.attention_backward(do, q, k, v, lse, delta, half, features)

    return run_backward


def dense_results(direction: Pass, tensors: list[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
    """Computes the outputs of a pass in `dtype` with torch.

    Returns {index: output} with the outputs that the pass computes. The output o of the forward pass has the index 0.
    In a backward pass, dq has the index 0, dk has the index 1, and dv has the index 2.
    """
    q, k, v, do = (x.detach().to(dtype).requires_grad_() for x in tensors)
    ends = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    o, _ = attention_reference(q, k, v, ends, ends, causal=True, dtype=dtype)
    if direction == "fwd":
        return {0: o.detach()}
    gradients = torch.autograd.grad(o, (q, k, v), do)
    places = {"dq": (0,), "dkdv": (1, 2), "dk": (1,), "dv": (2,)}[direction]
    return {place: gradients[place] for place in places}


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def check(candidate: Candidate, device: str = "cuda") -> str:
    """Compiles a candidate into Triton's cache and checks its outputs. Returns an error message, or an empty string.

    An error is the difference of an output element from its value in fp64. The root mean square of the candidate's
    errors must be at most twice that of torch's errors, plus rounding. The candidate's largest error must be at most
    four times torch's largest error, plus rounding. The factor of four is needed because a largest error depends on
    chance. For example, on an AMD CPU, the largest error of a correct dq in fp32 was up to 2.9 times the largest error
    of torch.
    """
    tensors = inputs(candidate, CHECKED_TOKENS, 2, device)
    found = launcher(candidate, *tensors)()
    dtype = tensors[0].dtype
    exact, torchs = (dense_results(candidate.direction, tensors, x) for x in (torch.float64, dtype))
    for place, wanted in exact.items():
        eps, errors, allowed = torch.finfo(dtype).eps, found[place] - wanted, torchs[place] - wanted
        for name, size, factor in (("root mean square", root_mean_square, 2), ("largest", largest, 4)):
            limit = factor * size(allowed) + eps * size(wanted)
            if not size(errors) <= limit:  # NaN fails too
                return f"wrong: the {name} error is {size(errors):.2g}, and {limit:.2g} is allowed"
    return ""


def compile_one(candidate: Candidate) -> tuple[Candidate, str]:
    """Returns the candidate and the result of `check`."""
    try:
        return candidate, check(candidate)
    except Exception as error:  # Triton, ptxas or the driver can fail for some candidates.
        return candidate, first_line(error)


def measure(chosen: list[Candidate], seqlen: int, jobs: int, rep: float) -> Iterator[Result]:
    """Compiles all candidates in `jobs` processes, and then times them one by one."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        errors = dict(pool.imap_unordered(compile_one, chosen))
    for candidate in chosen:
        if errors[candidate]:
            yield Result(candidate, None, None, errors[candidate])
            continue
        tensors = inputs(candidate, seqlen, MODEL_DIM // candidate.head_dim)
        ms: Any = do_bench(launcher(candidate, *tensors), rep=rep, return_mode="median")
        yield Result(candidate, ms, flops(candidate, seqlen) / ms / 1e9)


def flops(candidate: Candidate, seqlen: int) -> float:
    """Returns the FLOPs of the matmuls of a kernel over one causal document."""
    n_heads = MODEL_DIM // candidate.head_dim
    return PRODUCTS[candidate.direction] * 2 * n_heads * seqlen**2 * candidate.head_dim / 2


def best(results: list[Result]) -> dict[tuple[int, Pass], Result]:
    """Returns the fastest result for each pair of head_dim and pass."""
    fastest: dict[tuple[int, Pass], Result] = {}
    for result in results:
        key = (result.candidate.head_dim, result.candidate.direction)
        if result.ms is not None and (key not in fastest or result.ms < (fastest[key].ms or 0)):
            fastest[key] = result
    return fastest


def entries(results: list[Result], name: str) -> str:
    """Formats the fastest result for each head_dim and pass as a line of the table in tiles.py.

    `name` is the name of the GPU architecture in tiles.py.
    """
    order = {direction: place for place, direction in enumerate(PASSES)}
    lines = [
        f'    ("{name}", {head_dim}, "{direction}"): TileConfig{astuple(result.candidate.tiles)},'
        for (head_dim, direction), result in sorted(
            best(results).items(), key=lambda item: (order[item[0][1]], item[0][0])
        )
    ]
    return "\n".join(lines)


def tiles_to_load(results: list[Result], arch: Arch) -> dict[tuned_tiles.Key, tuned_tiles.Sizes]:
    """Returns the fastest tiles in the form that tuned_tiles.write_tiles needs."""
    return {
        (head_dim, direction, itemsize): astuple(result.candidate.tiles)
        for (head_dim, direction), result in best(results).items()
        if head_dim in HEAD_DIMS and is_listed(arch, head_dim, direction, itemsize := ITEMSIZE[result.candidate.dtype])
    }


def add_tiles(file: Path, gpu: str, tiles: dict[tuned_tiles.Key, tuned_tiles.Sizes]) -> None:
    """Writes tiles to a file. Keeps the file's tiles for other head_dims, passes and dtypes."""
    earlier = tuned_tiles.read_tiles(str(file), gpu) if file.exists() else {}
    tuned_tiles.write_tiles(file, gpu, earlier | tiles)


def markdown(results: list[Result], head: dict[str, str], arch: Arch, name: str, seqlen: int) -> str:
    """Formats the page: its header, a table for each head_dim and pass, and the entries for tiles.py.

    The lines of a table are sorted by time. All results have the same dtype.
    """
    dtype: Dtype = results[0].candidate.dtype if results else "bfloat16"
    lines = [
        *header("Tiles of the portable kernels", head),
        f"One causal document of {seqlen} tokens, {dtype}, n_heads × head_dim = {MODEL_DIM} or slightly less, no "
        "grouped heads. Times are medians. TFLOP/s counts each kernel's matmuls (forward 2, dkdv 4, dk 3, dv 2, dq 3), "
        "halved for causality. **Bold**: the present entry of `kernels/fa_kernels/flash_attention/tiles.py`.",
    ]
    for key in dict.fromkeys((result.candidate.direction, result.candidate.head_dim) for result in results):
        direction, head_dim = key
        listed = is_listed(arch, head_dim, direction, ITEMSIZE[dtype])
        current = tile_config(arch, head_dim, direction, ITEMSIZE[dtype]) if listed else None
        lines += [
            "",
            f"## {direction}, head_dim {head_dim}",
            "",
            "| block_m | block_n | warps | stages | ms | TFLOP/s |",
        ]
        lines.append("|--:|--:|--:|--:|--:|--:|")
        here = [result for result in results if (result.candidate.direction, result.candidate.head_dim) == key]
        for result in sorted(here, key=lambda result: result.ms or float("inf")):
            measured = [result.error, ""] if result.ms is None else [f"{result.ms:.3f}", f"{result.tflops:.0f}"]
            cells = [*map(str, astuple(result.candidate.tiles)), *measured]
            if result.candidate.tiles == current:
                cells = [f"**{cell}**" if cell else cell for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## The entries", "", "```python", entries(results, name), "```"]
    return "\n".join(lines) + "\n"


def parse_tiles(text: str) -> TileConfig:
    """Parses block_m,block_n,num_warps,num_stages."""
    try:
        tiles = TileConfig(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be block_m,block_n,num_warps,num_stages; got {text}") from None
    blocks, warps = {*tuned_tiles.BLOCKS}, tuned_tiles.WARPS
    if not {tiles.block_m, tiles.block_n} <= blocks or tiles.num_warps not in warps or tiles.num_stages < 1:
        raise argparse.ArgumentTypeError(
            f"blocks must be 16, 32, 64 or 128, warps 1, 2, 4, 8 or 16, and stages at least 1; got {text}"
        )
    return tiles


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), help="values from 8 to 256")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--near", action="store_true", help="try the table's entries and tiles one step from them")
    which.add_argument("--tiles", type=parse_tiles, nargs="+", help="tiles as block_m,block_n,num_warps,num_stages")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--seqlen", type=int, default=16384, help="tokens")
    parser.add_argument("--rep", type=float, default=80, help="milliseconds of measurement per timing")
    parser.add_argument(
        "--jobs", type=int, default=min(16, os.cpu_count() or 1), help="number of processes that compile kernels"
    )
    parser.add_argument("--install", action="store_true", help="let fa_kernels use the fastest tiles on this GPU")
    add_results(parser, "scripts/results/portable_tiles_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    if args.install and args.tiles:
        parser.error("--install must not be used with --tiles, which does not find the fastest tiles")
    for head_dim in args.head_dims:
        if not 8 <= head_dim <= 256 or head_dim % 8:
            parser.error(f"--head-dims must be multiples of 8 from 8 to 256; got {head_dim}")
    require_positive(parser, args, ("seqlen", "jobs"))
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_gpu("scripts.bench.tune_tiles")
    device = torch.device("cuda", torch.cuda.current_device())
    arch, limit = arch_of(device), shared_memory(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm{major}{minor}" if arch == "unknown" else arch
    tried = near if args.near else candidates
    chosen = [
        Candidate(head_dim, direction, tiles, args.dtype)
        for direction, head_dim in product(args.passes, args.head_dims)
        for tiles in args.tiles or tried(arch, head_dim, direction, limit, args.dtype)
    ]
    print(f"{len(chosen)} candidates", flush=True)
    results = []
    for result in measure(chosen, args.seqlen, args.jobs, args.rep):
        results.append(result)
        found = result.error or f"{result.ms:.3f} ms, {result.tflops:.0f} TFLOP/s"
        candidate = result.candidate
        print(f"{candidate.direction} d={candidate.head_dim} {astuple(candidate.tiles)}: {found}", flush=True)
    out = results_prefix(args.out, "portable_tiles")
    head = describe("-m scripts.bench.tune_tiles", args.commit)
    Path(f"{out}.md").write_text(markdown(results, head, arch, name, args.seqlen), encoding="utf-8")
    gpu, tile_file = torch.cuda.get_device_name(device), Path(f"{out}.json")
    add_tiles(tile_file, gpu, tiles_to_load(results, arch))
    print(f"{entries(results, name)}\nresults: {out}.md")
    if args.install:
        installed = tuned_tiles.installed_file(gpu)
        add_tiles(installed, gpu, tiles_to_load(results, arch))
        print(f"fa_kernels uses them from now on: {installed}")
    else:
        print(f"export {tuned_tiles.VARIABLE}={shlex.quote(str(tile_file.absolute()))} makes fa_kernels use them")


if __name__ == "__main__":
    main()
