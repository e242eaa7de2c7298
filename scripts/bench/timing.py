"""The GPU's time of several candidates, each replayed as a CUDA graph, in random order."""

import os
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import triton

FEWEST = 6  # runs of which a median is taken


def require_gpu(script: str) -> None:
    """Ends a script where there is no GPU, or where Triton would interpret kernels."""
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA GPU; torch sees none on this machine")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit(f"{script} times compiled kernels; unset TRITON_INTERPRET")


def captured(prepare: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """What replays the function that `prepare` returns as a CUDA graph, so that no host's time is in a timing of it.

    prepare is called on the stream of the graph, where autograd then runs a backward pass too. What cannot be captured
    is launched anew each time, which stderr says.
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
        return run  # what it reads must live as long as the graph

    return replay


def median_ms(runs: Mapping[str, Callable[[], object]], *, rep: float = 60) -> dict[str, float]:
    """The median milliseconds of each, all their runs in one order drawn at random, the same in every process.

    A GPU's clock falls as it grows hot, so what follows a kernel that leaves it hot seems slower: in turns, with the
    same two neighbours each time, by up to 2% on an H200, where a random order gives one kernel under two names the
    same time within 0.3%. The L2 cache is cleared before each run.

    Units: rep is the milliseconds that each runs in all, but FEWEST times at least, after two runs that do not count.
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
