"""Measures the time and the padding of best-fit packing for documents of random lengths, on one core.

    python -m scripts.bench.packing                        # 1,000,000 documents, rows of 2048, 8192 and 32768 tokens.
    python -m scripts.bench.packing --documents 10000000 --seq-lens 8192    # 10,000,000 documents, rows of 8192.

The document lengths are log-normal like those of web pages: the median is 400 tokens, the mean about 1,000, and 1% are
above 9,600. Documents that are longer than a row are split.
"""

import argparse
import os
import platform
import time

import numpy as np

from fa_train.data.packing.best_fit import make_plan, report_plan
from scripts.bench.command_line import require_positive

MEDIAN, SIGMA, LONGEST = 400, 1.366, 200_000  # document lengths in tokens are log-normal, at most LONGEST


def lengths_of(documents: int) -> np.ndarray:
    """Returns random document lengths from 1 to `LONGEST` tokens, (documents,) int64, the same in every call."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, documents)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def measure(lengths: np.ndarray, seq_len: int, runs: int) -> dict[str, float]:
    """Returns the fastest and slowest time in s, the number of rows, and the share of tokens that is not padding."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        plan = make_plan(lengths, seq_len, seq_len, "split")
        seconds.append(time.perf_counter() - start)
    report = report_plan(plan, lengths, seq_len, seq_len, "split")
    assert report.tokens_packed == lengths.sum(), "no token is lost"
    return {"fastest": min(seconds), "slowest": max(seconds), "rows": report.rows, "efficiency": report.efficiency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="number of documents")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens per row")
    parser.add_argument("--runs", type=int, default=3, help="runs per length; the fastest and the slowest are shown")
    arguments = parser.parse_args()
    require_positive(parser, arguments, ("documents", "runs", "seq_lens"))
    lengths = lengths_of(arguments.documents)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {load}")
    described = f"mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    print(f"{len(lengths):,} documents, {lengths.sum():,} tokens: {described}")
    print("| seq_len | rows | not padding | seconds, fastest | slowest |\n|---:|---:|---:|---:|---:|")
    for seq_len in arguments.seq_lens:
        found = measure(lengths, seq_len, arguments.runs)
        print(
            f"| {seq_len:,} | {found['rows']:,} | {found['efficiency']:.3%} "
            f"| {found['fastest']:.2f} | {found['slowest']:.2f} |"
        )


if __name__ == "__main__":
    main()
