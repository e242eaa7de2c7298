"""Fixtures for every test: where kernels run, NaN in fresh memory, a fixed seed."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

# Triton reads this when a kernel is defined, so it must stand before any test module imports kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def kernels_are_compiled() -> bool:
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


# whose tests take the longest, of minutes all; last, one would leave the other cores of pytest-xdist without work
LONGEST = (
    "test_aot",
    "test_strategy",
    "test_train",
    "test_ablate_memory",
    "test_finetune",
    "test_export_hf",
    "test_skipped_steps",
    "test_resume",
)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of one xdist_group share a worker, and so the runs that their fixtures start."""
    if config.getoption("dist", None) == "load":  # what -n alone means
        config.option.dist = "loadgroup"


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, triton {version('triton')}"


def pytest_collection_finish() -> None:
    """Hundreds of thousands of objects came with the imports, which garbage collection need not look through again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.stem.startswith(LONGEST))
    if kernels_are_compiled():
        return
    skip = pytest.mark.skip(reason="needs CUDA and TRITON_INTERPRET unset")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run here: CUDA when they are compiled, the CPU in the interpreter."""
    return torch.device("cuda" if kernels_are_compiled() else "cpu")


@pytest.fixture(autouse=True, scope="session")
def _interpreter_at_its_best() -> Iterator[None]:
    if kernels_are_compiled():
        yield
        return
    from tests.interpreter import patched_once_a_launch  # imports triton, which reads what stands above

    with patched_once_a_launch():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        # kernels' calls are recorded as they are outside of tests: without this fill
        recorded = type(_get_current_dispatch_mode()).__module__ == "kernels.flash_attention.replay"
        with torch.no_grad(), _pop_mode_temporarily() if recorded else nullcontext():
            return tensor.fill_(_poison(tensor.dtype))

    return allocate_and_fill


@pytest.fixture(autouse=True, scope="session")
def _poison_uninitialised_memory() -> Iterator[None]:
    """Fresh memory is often zero, which hides an output that a kernel forgot to write; NaN does not.

    torch.use_deterministic_algorithms fills memory too, but it also makes torch run other kernels than in production.
    """
    with torch.device("meta"):
        torch.empty(0)  # torch remembers now which functions a device context changes: the real ones
    from kernels import torch_private  # imports triton, which reads TRITON_INTERPRET

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (Tensor, ("new_empty", "new_empty_strided")),
            (torch_private, ("empty_strided_cuda",)),  # what recorded calls allocate with
        ):
            for name in names:
                patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield
