"""Measures the GPU time of several candidates, which run as CUDA graphs in random order."""

import os
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import triton

FEWEST = 6  # smallest number of runs over which a median is taken


def require_gpu(script: str, advice: str = "") -> None:
    """Ends the script if there is no GPU, or if TRITON_INTERPRET=1 would interpret the kernels.

    advice: another sentence for the message if there is no GPU.
    """
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA GPU; torch sees none on this machine{advice and f'. {advice}'}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit(f"{script} times compiled kernels, so TRITON_INTERPRET must not be 1. Run `unset TRITON_INTERPRET`")


def captured(prepare: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Captures a CUDA graph of the function that `prepare` returns.

    `prepare` is called on the stream of the graph, because autograd runs a backward pass on the stream of its forward
    pass. If a function cannot be captured, the function itself is returned, and a message on stderr says so.
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
        return run  # keeps `run` alive: the graph uses the tensors that `run` holds

    return replay


def median_ms(runs: Mapping[str, Callable[[], object]], *, rep: float = 60) -> dict[str, float]:
    """Returns the median milliseconds of each candidate.

    The candidates run in random order, which is the same in every process.

    A hot GPU lowers its clock, so a kernel seems slower if it runs after a kernel that heats the GPU. On an H200, the
    times of equal kernels differ by up to 2% if the order is fixed, and by at most 0.3% if the order is random. The L2
    cache is cleared before each run of a candidate.

    Units: `rep` is the total time per candidate in milliseconds. Each candidate runs at least `FEWEST` times after two
    warm-up runs.
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
