"""Measures attention under context parallelism on all GPUs of a machine, and compares it with attention on one GPU.

    python -m scripts.bench.context                        # 32k, 128k and 256k tokens on all GPUs.
    python -m scripts.bench.context --tokens 131072 --streams one log-normal    # two kinds of streams.
    python -m scripts.bench.context --lengths lengths.txt --streams file    # lengths from a file.

The token stream `one` is one document, and `window` is one document with an attention window of 4096 tokens. The stream
`short` has documents of 64 to 512 tokens, and the stream `log-normal` has documents of log-normal lengths. The stream
`file` draws lengths from a file, and limits each length to a quarter of the stream, as in MagiAttention's benchmarks.

The benchmark times five computations, called parts. In the part `one`, each rank computes the attention of the whole
stream. For streams of more than 512k tokens, the attention heads of the part `one` are divided among the ranks, and the
measured time is multiplied by the number of ranks. In the part `shared`, the ranks share the attention of the stream
(fa_train.parallel.context). In the part `forward`, all ranks together compute only the forward pass of the stream's
attention. In the part `alone`, each rank computes its share of the stream's attention in one call, without
communication. In the part `moved`, the ranks only exchange keys, values and their gradients.

Every repetition draws new documents. A repetition measures all parts, in random order. Each rank first calls a part
twice without timing, to record the launches (fa_kernels.launch.record). Each rank then measures the mean time of
--layers further calls with the same documents. The time of the part `one` is the mean over all ranks, and the time of
every other part is that of the slowest rank. The script reports medians over the repetitions. All parts except
`forward` include the backward pass. Tensors are bf16, or fp32 with --cpu-ranks. The ideal time is the time of `one`,
divided by the number of ranks. The exposed share is the time of `shared` divided by that of `alone`, minus 1. The
script writes OUT.md with the times, and OUT.png with the speeds relative to the ideal speed. With --peer, the script
also times torch's attention and torch's context parallelism on one long document (scripts/bench/context_peer.py).
"""

import argparse
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from fa_kernels.flash_attention.schedule import Schedule, length_class_of
from fa_train.errors import errors_in_one_line
from fa_train.models.attention import flash_attention
from fa_train.models.stream import windowed_schedule
from fa_train.parallel.context.attention import ContextAttention, SharedSchedule, shared_schedule
from fa_train.parallel.context.attention_operators import used_part
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import gathered, new_context_group, register_group, summed_gradients
from fa_train.parallel.context.traffic import traffic
from scripts.bench.attention import attended_pairs, fill_row
from scripts.bench.command_line import add_results, require_positive
from scripts.bench.context_peer import PEER_PARTS, peer_parts
from scripts.bench.context_report import PARTS, Result, draw, peer_table, table
from scripts.bench.page import header
from scripts.bench.provenance import describe, results_prefix
from scripts.bench.timing import require_gpu

WINDOW = 4096  # number of keys that a query sees in the token stream "window"
STREAMS = ("one", "log-normal", "short", "window")
FROM_FILE = "file"
FITS_ONE_GPU = 2**19  # maximum number of tokens for which one GPU computes the attention of all heads
UNTIMED_CALLS = 2  # the second call records its launches; most calls in training repeat recorded launches
START_METHOD = "spawn"


@dataclass(frozen=True)
class Setting:
    """The settings of all cases.

    layers: how many calls of a function one timing covers.
    lengths: the lengths from which the token stream with the name `file` draws its document lengths.
    warm_up: the number of untimed repetitions.
    head_groups: the number of head groups of ContextAttention, which computes the parts `shared` and `forward`.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    layers: int
    repetitions: int
    device: str
    peer: bool = False
    lengths: tuple[int, ...] = ()
    warm_up: int = 2
    head_groups: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def parts(self, stream: str) -> tuple[str, ...]:
        return PARTS + PEER_PARTS if self.peer and stream == "one" else PARTS


def documents(stream: str, tokens: int, seed: int, lengths: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns document lengths that add up to `tokens`."""
    generator = np.random.default_rng(seed)
    if stream == "log-normal":
        drawn = generator.lognormal(np.log(1024), 1.2, tokens // 16 + 1).astype(int).clip(16, 32768)
    elif stream == "short":
        drawn = generator.integers(64, 513, tokens // 64 + 1)
    elif stream == FROM_FILE:
        drawn = np.minimum(generator.choice(np.array(lengths), tokens), max(1, tokens // 4))
    else:
        return (tokens,)
    return fill_row(drawn.tolist(), tokens)


class Case:
    """The inputs of one repetition on this rank."""

    def __init__(self, stream: str, tokens: int, seed: int, setting: Setting) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        lengths, window = documents(stream, tokens, seed, setting.lengths), WINDOW if stream == "window" else None
        boundaries = np.cumsum([0, *lengths])
        dealt = deal(boundaries, tokens, ranks, balanced=window is None)
        local = dealt.total // ranks  # number of tokens of each rank, including padding
        plan = traffic(dealt, boundaries, rank, window)
        # the mean document length, where a document of n tokens counts n times, as in training
        mean = round(sum(length**2 for length in lengths) / tokens)
        self.pairs = attended_pairs(lengths, window)
        self.received = sum(plan.sizes[1]) / max(1, dealt.total - local)
        device = torch.device(setting.device, rank) if setting.device == "cuda" else torch.device("cpu")
        length_class = length_class_of(mean if window is None else min(mean, window))
        schedule = shared_schedule(move_data_to_device(plan, device), length_class)
        in_one_run = traffic(dealt, boundaries, rank, window, may_split=False)
        alone = shared_schedule(move_data_to_device(in_one_run, device), length_class)
        n_keys = int(alone.moves.counts[0])
        own_share = used_part(alone.crossing.tensors(), local, n_keys)
        own = Schedule.from_tensors(own_share, True, alone.crossing.length_class)
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        whole = windowed_schedule(cu_seqlens, tokens, device, window, mean)
        heads = _divided(setting, ranks) if tokens > FITS_ONE_GPU else setting
        attention = ContextAttention(flash_attention, "bench", setting.head_groups)
        q, k, v, _ = _inputs(setting, device, local, local)
        self.parts: dict[str, Callable[[], object]] = {
            "shared": _both_passes(attention, schedule, setting, device, local, local),
            "forward": lambda: attention(q, k, v, schedule),
            "alone": _both_passes(flash_attention, own, setting, device, local, n_keys),
            "moved": _exchange(schedule, local, setting, device),
            # All GPUs compute this part, because a single busy GPU would become hotter and slower than the others.
            "one": _both_passes(flash_attention, whole, heads, device, tokens, tokens),
        }
        if PEER_PARTS[0] in setting.parts(stream):
            self.parts |= peer_parts(tokens, setting.n_heads, setting.n_kv_heads, setting.head_dim, device)


def _both_passes(
    attend: Callable[..., Tensor], schedule: object, setting: Setting, device: torch.device, queries: int, keys: int
) -> Callable[[], object]:
    """Returns a function that computes the gradients of random q, k and v."""
    q, k, v, do = _inputs(setting, device, queries, keys)
    return lambda: torch.autograd.grad(attend(q, k, v, schedule), (q, k, v), do)


def _exchange(schedule: SharedSchedule, local: int, setting: Setting, device: torch.device) -> Callable[[], object]:
    """Returns a function that only exchanges keys, values and their gradients. local: the keys that each rank holds."""
    moves, counts = schedule.moves, schedule.moves.read_counts()
    if not counts.exchanges:
        return lambda: None
    shape = (2, local, setting.n_kv_heads, setting.head_dim)
    keys = torch.randn(shape, dtype=setting.dtype, device=device).unbind()
    totals = torch.zeros(shape, dtype=setting.dtype, device=device).unbind() if counts.splits else None

    def exchange() -> None:
        gathered(keys, moves, counts.rows, "bench")
        summed_gradients(gathered(keys, moves, counts.rows, "bench"), moves, "bench", totals)

    return exchange


def _divided(setting: Setting, ranks: int) -> Setting:
    """Returns `setting` with the number of heads that one rank computes.

    Raises: ValueError if the heads cannot be divided equally.
    """
    if setting.n_kv_heads % ranks:
        raise ValueError(
            f"--n-kv-heads must be a multiple of the {ranks} ranks for streams of more than {FITS_ONE_GPU:,} tokens; "
            f"got {setting.n_kv_heads}"
        )
    return replace(setting, n_heads=setting.n_heads // ranks, n_kv_heads=setting.n_kv_heads // ranks)


def _inputs(setting: Setting, device: torch.device, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (
        (queries, setting.n_heads),
        (keys, setting.n_kv_heads),
        (keys, setting.n_kv_heads),
        (queries, setting.n_heads),
    )
    q, k, v, do = (torch.randn(*size, setting.head_dim, dtype=setting.dtype, device=device) for size in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def measure(stream: str, tokens: int, setting: Setting) -> Result:
    """Measures one kind of token stream on all ranks. Every rank returns the same result."""
    ranks = dist.get_world_size()
    parts = setting.parts(stream)
    samples: dict[str, list[list[float]]] = {part: [] for part in parts}
    received, pairs = [], []
    for repetition in range(setting.warm_up + setting.repetitions):
        case = Case(stream, tokens, repetition, setting)
        for part in random.Random(repetition).sample(parts, len(parts)):
            dist.barrier()
            times = [0.0] * ranks
            dist.all_gather_object(times, _milliseconds(case.parts[part], setting))
            if repetition >= setting.warm_up:
                samples[part].append(times)
        shares = [0.0] * ranks
        dist.all_gather_object(shares, case.received)
        received.append(max(shares))
        pairs.append(case.pairs)
    by_rank = [statistics.median(times) for times in zip(*samples["alone"], strict=True)]
    ms = {part: statistics.median(map(max, times)) for part, times in samples.items()}
    for part in ("one", PEER_PARTS[0]):
        if part in samples:
            ms[part] = statistics.median(map(statistics.mean, samples[part]))
    if tokens > FITS_ONE_GPU:
        ms["one"] *= ranks  # each rank computed only 1/ranks of the heads
    flops = 4 * setting.n_heads * setting.head_dim * statistics.median(pairs[setting.warm_up :])
    exposed = statistics.median(
        max(shared) / max(alone) - 1 for shared, alone in zip(samples["shared"], samples["alone"], strict=True)
    )
    return Result(stream, tokens, ms, by_rank, statistics.median(received[setting.warm_up :]), exposed, flops)


def _milliseconds(run: Callable[[], object], setting: Setting) -> float:
    """Returns the mean time of `setting.layers` calls of `run`, after UNTIMED_CALLS calls."""
    for _ in range(UNTIMED_CALLS):
        run()
    if setting.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(setting.layers):
        run()
    if setting.device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / setting.layers


def run_rank(rank: int, ranks: int, port: int, setting: Setting, args: argparse.Namespace) -> None:
    """Measures all cases, together with the other ranks.

    rank, ranks: the number of this process, and how many processes take part.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if setting.device == "cuda" else None
    dist.init_process_group("nccl" if device else "gloo", rank=rank, world_size=ranks, device_id=device)
    register_group("bench", new_context_group(range(ranks)))
    results = []
    for tokens in args.tokens:
        for stream in args.streams:
            results.append(measure(stream, tokens, setting))
            if rank == 0:
                print(table(results, ranks)[-1], flush=True)
    if rank == 0:
        head = describe("-m scripts.bench.context", args.commit)
        lines = header("Attention under context parallelism", head)
        heads = f"{setting.n_heads} query and {setting.n_kv_heads} KV heads, head_dim {setting.head_dim}"
        lines += [f"{heads}. A time is the mean of {setting.layers} calls with the same documents.", ""]
        lines += [*table(results, ranks), *peer_table(results, ranks), ""]
        print("\n".join(peer_table(results, ranks)), flush=True)
        out = results_prefix(args.out, "context")
        Path(f"{out}.md").write_text("\n".join(lines), encoding="utf-8")
        draw(results, ranks, f"Attention on {ranks} GPUs, {heads}").savefig(f"{out}.png", dpi=150)
    dist.destroy_process_group()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072, 262144], help="tokens of a stream")
    parser.add_argument("--streams", nargs="+", choices=(*STREAMS, FROM_FILE), default=STREAMS)
    parser.add_argument("--lengths", type=Path, help="text file with document lengths, for the stream `file`")
    parser.add_argument("--n-heads", type=int, default=32)
    parser.add_argument("--n-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-groups", type=int, default=1, help="groups of KV heads that are gathered one by one")
    parser.add_argument(
        "--layers", type=int, default=4, help="number of calls, with the same documents, whose mean time is taken"
    )
    parser.add_argument("--repetitions", type=int, default=11, help="timed repetitions, each with new documents")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed repetitions before the timed ones")
    parser.add_argument("--peer", action="store_true", help="also measure torch's context parallelism, on GPUs")
    parser.add_argument("--cpu-ranks", type=int, help="processes on the CPU instead of GPUs, to try the script")
    add_results(parser, "scripts/results/context_<gpu>_<yyyymm>")
    args = parser.parse_args(arguments)
    require_positive(
        parser, args, ("tokens", "n_heads", "n_kv_heads", "head_dim", "head_groups", "layers", "repetitions")
    )
    if args.n_kv_heads % args.head_groups:
        parser.error(f"--head-groups must divide the {args.n_kv_heads} KV heads; got {args.head_groups}")
    if args.warm_up < 0:
        parser.error(f"--warm-up must not be negative; got {args.warm_up}")
    if (FROM_FILE in args.streams) != (args.lengths is not None):
        parser.error(f"--lengths and the stream {FROM_FILE} need each other; got {args.lengths} and {args.streams}")
    try:
        args.document_lengths = tuple(map(int, args.lengths.read_text().split())) if args.lengths else ()
    except (OSError, ValueError) as error:
        parser.error(f"--lengths must be a text file with whole numbers; got {args.lengths}: {error}")
    if args.lengths and min(args.document_lengths, default=0) < 1:
        parser.error(f"--lengths must hold at least one positive number and no others; got {args.lengths}")
    if args.peer and args.cpu_ranks is not None:
        parser.error("--peer needs GPUs, because cuDNN's attention has no CPU version; got --cpu-ranks")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.cpu_ranks is None:
        require_gpu("scripts.bench.context")
    ranks = args.cpu_ranks or torch.cuda.device_count()
    if ranks < 2:
        sys.exit(f"scripts.bench.context needs at least 2 GPUs, or --cpu-ranks of at least 2; got {ranks}")
    device = "cuda" if args.cpu_ranks is None else "cpu"
    sizes = args.n_heads, args.n_kv_heads, args.head_dim
    setting = Setting(
        *sizes, args.layers, args.repetitions, device, args.peer, args.document_lengths, args.warm_up, args.head_groups
    )
    if max(args.tokens) > FITS_ONE_GPU:
        with errors_in_one_line((ValueError,)):
            _divided(setting, ranks)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    print("\n".join(table([], ranks)), flush=True)
    torch.multiprocessing.start_processes(
        run_rank, args=(ranks, port, setting, args), nprocs=ranks, start_method=START_METHOD
    )


if __name__ == "__main__":
    main()
