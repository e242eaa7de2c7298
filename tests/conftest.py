"""Fixtures for all tests, such as the device on which kernels run, NaN in uninitialised memory and a fixed seed."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Files and folders of tests that train with several ranks
SEVERAL_RANKS = (
    "tests/parallel/",
    "tests/models/test_initial_weights.py",
    "tests/test_resume.py",
    "tests/test_skipped_steps.py",
)

gc.disable()  # importing test files creates many objects, but garbage collections would free few of them

# Set TRITON_INTERPRET before any module imports Triton, because Triton reads it when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.support.fast_configs  # noqa: E402, F401  imports Lightning, which imports Triton


def kernels_are_compiled() -> bool:
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, triton {version('triton')}"


def pytest_collection_finish() -> None:
    """Excludes the objects created by imports from garbage collection, because scanning them takes time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Calls gc.freeze again after each file, because a run with data workers calls gc.unfreeze."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Lets Python free the frozen objects at exit. Otherwise, Triton 3.9 warns that its objects were not freed."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of mostly slow tests start first, because a long file that starts last leaves other workers idle.
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: 2 * slow[item.path] < tests[item.path])
    if kernels_are_compiled():
        return
    skip = pytest.mark.skip(reason="needs CUDA and TRITON_INTERPRET unset")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)  # only pytest-xdist calls this hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lets one worker run the tests that train with several ranks, while other workers run the other tests.

    If the ranks of two tests shared the CPU cores, ranks would wait far longer for each other.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class OneWorkerForRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "several ranks" if file.startswith(SEVERAL_RANKS) else file

    return OneWorkerForRanks(config, log)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Returns the GPU if kernels are compiled, or the CPU if they are interpreted."""
    return torch.device("cuda" if kernels_are_compiled() else "cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Initialises torch.distributed in this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def bf16_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables oneDNN, whose bf16 matmuls crash on virtual machines that announce AMX without having it."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_at_its_best() -> Iterator[None]:
    if kernels_are_compiled():
        yield
        return
    # this module imports Triton, which reads TRITON_INTERPRET
    from tests.support.interpreter import patched_once_a_launch

    with patched_once_a_launch():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _poison_uninitialised_memory() -> Iterator[None]:
    from tests.kernels.support.poison import poisoned_memory

    with poisoned_memory():
        yield
