"""Measures the GPU time of several candidates, which are replayed as CUDA graphs in random order."""

import os
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import triton

FEWEST = 6  # minimum number of runs in a median


def require_gpu(script: str) -> None:
    """Ends a script if there is no GPU, or if Triton would interpret kernels."""
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA GPU; torch sees none on this machine")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit(f"{script} times compiled kernels; unset TRITON_INTERPRET")


def captured(prepare: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Captures the function that `prepare` returns as a CUDA graph, so that a timing contains no host time.

    `prepare` is called on the stream of the graph, because autograd runs a backward pass on the stream of its forward
    pass. A function that cannot be captured is launched each time, and a message on stderr says so.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = prepare()
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            print(f"not captured in a CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.synchronize()
            return run

    def replay() -> object:
        graph.replay()
        return run  # its inputs must live as long as the graph

    return replay


def median_ms(runs: Mapping[str, Callable[[], object]], *, rep: float = 60) -> dict[str, float]:
    """Returns the median milliseconds of each candidate. All runs have one random order, the same in every process.

    A hot GPU lowers its clock, so a kernel seems slower if it runs after a kernel that heats the GPU. If candidates
    always run in the same order, this bias reaches 2% on an H200. If they run in random order, the times of equal
    kernels differ by at most 0.3%. The L2 cache is cleared before each run.

    Units: `rep` is the total milliseconds per candidate. Each candidate runs at least FEWEST times, after two warm-up
    runs.
    """
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()

    def times(names: Sequence[str]) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in names]
        for name, (start, end) in zip(names, pairs, strict=True):
            driver.clear_cache(cache)
            start.record()
            runs[name]()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    first = {name: min(times([name, name])) for name in runs}
    order = [name for name in runs for _ in range(max(FEWEST, round(rep / first[name])))]
    random.Random(0).shuffle(order)
    samples = list(zip(order, times(order), strict=True))
    return {name: statistics.median(ms for other, ms in samples if other == name) for name in runs}
