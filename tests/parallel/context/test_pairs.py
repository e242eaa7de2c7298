"""Two and four processes that share streams compute the same losses, gradients and weights as one process.

By default, as in CI, no case of this file runs. CI runs the cases in test_four_ranks.py. With CONTEXT_CASES=pairwise,
the cases contain every combination of the values of any two settings. With CONTEXT_CASES=all, all combinations run,
which takes hours.
"""

import os
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.memory.support.small import ATTENTIONS
from tests.parallel.context.support.training import BOUNDARIES, FEATURES, Case, in_processes, train
from tests.parallel.support.sharding import MEMORIES, Recorder, assert_close
from tests.support.interpreter import patched_once_a_launch
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun

MESHES = [(1, 2), (2, 1), (2, 2), (1, 4)]  # (number of context groups, ranks in each group)
PAIRWISE = [
    Case("naive", "several", "cap", 2, 1, 2, "full-offload", compiled=False),
    Case("sdpa", "padded", "gqa", 1, 1, 2, "none", compiled=True),
    Case("chunked", "one", "window", 2, 1, 2, "offload-all", compiled=True),
    Case("flash", "padded", "sinks", 2, 1, 2, "selective", compiled=False),
    Case("naive", "one", "cap", 1, 2, 1, "offload-all", compiled=False),
    Case("sdpa", "one", "window", 1, 2, 1, "full-offload", compiled=True),
    Case("chunked", "one", "cap", 1, 2, 1, "full-offload", compiled=False),
    Case("flash", "padded", "gqa", 2, 2, 1, "selective", compiled=False),
    Case("flash", "one", "sinks", 1, 2, 1, "none", compiled=False),
    Case("flash", "several", "window", 1, 2, 1, "none", compiled=False),
    Case("flash", "padded", "cap", 2, 2, 1, "offload-all", compiled=False),
    Case("naive", "one", "gqa", 2, 1, 4, "selective", compiled=False),
    Case("naive", "padded", "cap", 1, 1, 4, "none", compiled=True),
    Case("sdpa", "several", "gqa", 2, 1, 4, "offload-all", compiled=False),
    Case("chunked", "padded", "window", 2, 1, 4, "none", compiled=False),
    Case("flash", "several", "sinks", 1, 1, 4, "full-offload", compiled=True),
    Case("naive", "one", "window", 1, 2, 2, "none", compiled=False),
    Case("sdpa", "several", "window", 2, 2, 2, "selective", compiled=True),
    Case("chunked", "several", "cap", 1, 2, 2, "selective", compiled=True),
    Case("chunked", "padded", "gqa", 1, 2, 2, "full-offload", compiled=True),
    Case("flash", "padded", "sinks", 2, 2, 2, "offload-all", compiled=False),
]
ALL = [
    case
    for attention, packing, feature, accumulation, (data, context), memory, compiled in product(
        ATTENTIONS, BOUNDARIES, FEATURES, (1, 2), MESHES, MEMORIES, (False, True)
    )
    if (case := Case(attention, packing, feature, accumulation, data, context, memory, compiled)).possible
]
CASES = {"ci": [], "pairwise": PAIRWISE, "all": ALL}[os.environ.get("CONTEXT_CASES", "ci")]
CASES_OF_A_PROCESS = 40  # each case makes process groups, which hold threads and sockets until the process ends


def test_each_two_values_meet():
    assert set(PAIRWISE) <= set(ALL)
    settings = ("attention", "packing", "feature", "accumulation", "mesh", "memory", "compiled")
    for one, other in combinations(settings, 2):
        pairs = [{(getattr(case, one), getattr(case, other)) for case in cases} for cases in (PAIRWISE, ALL)]
        assert pairs[0] == pairs[1], (one, other)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Runs many cases with the same number of ranks in the same processes, because a process takes seconds to start."""
    folder: Path = tmp_path_factory.mktemp("context_pairs")
    start_server()
    for ranks in (2, 4):
        cases = [case for case in CASES if case.ranks == ranks]
        for first in range(0, len(cases), CASES_OF_A_PROCESS):
            arguments = (str(folder), ranks_of_torchrun(ranks), cases[first : first + CASES_OF_A_PROCESS])
            torch.multiprocessing.start_processes(in_processes, args=arguments, nprocs=ranks, start_method="forkserver")
    return folder


@cache
def one_process(attention: str, packing: str, feature: str, micro_batches: int) -> Recorder:
    with patched_once_a_launch():
        return train(Case(attention, packing, feature, micro_batches, 1, 1, "none", False))


@pytest.mark.slow
@needs_ports
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_compute_what_one_process_does(case, results):
    expected = one_process(case.attention, case.packing, case.feature, case.data * case.accumulation)
    ours = torch.load(results / f"{case}.pt")
    assert ours["gradients"].keys() == ours["weights"].keys()
    torch.testing.assert_close(ours["losses"], expected.losses, rtol=1e-5, atol=0)
    assert_close(ours["gradients"], expected.gradients, 1e-5)
    assert_close(ours["weights"], expected.weights, 1e-5)
