"""The GPU's time of several candidates, each replayed as a CUDA graph; they take turns."""

import os
import statistics
import sys
from collections.abc import Callable, Mapping

import torch
import triton

ROUNDS = 6


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
    """The median milliseconds of each, from ROUNDS rounds in which all take their turn, every second round backwards.

    A GPU's clock falls as it grows hot; in turns, it falls for all alike, and in both orders none always follows one
    that leaves it hotter than others do. The L2 cache is cleared before each run.

    Units: rep is the milliseconds that each runs in all, at least once a round, after a first round that is not
    counted.
    """
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()

    def times(run: Callable[[], object], repeats: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            driver.clear_cache(cache)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    first = {name: min(times(run, 2)) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in [*runs][:: -1 if turn % 2 else 1]:
            samples[name] += times(runs[name], max(1, round(rep / ROUNDS / first[name])))
    return {name: statistics.median(sample) for name, sample in samples.items()}
