"""The package `kernels` can load the folder that scripts/hf_kernel.py writes, even after an import of fa_kernels.

`make install-dev` installs `kernels` in a folder that is not on Python's path.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_path
from types import ModuleType

import pytest
import torch

from fa_kernels import device, flash_attn_func
from scripts.hf_kernel import ARCHITECTURES, relocated, write_kernel
from tests.support.operators import Operators

ROOT = Path(__file__).parents[2]
LIBRARY = Path(sys.prefix, "hf-kernels")  # where the Makefile installs the package `kernels`


@pytest.fixture(scope="module")
def variant(tmp_path_factory) -> Path:
    return write_kernel(tmp_path_factory.mktemp("kernel"))


def name_of(variant: Path) -> str:
    name: str = json.loads((variant / "metadata.json").read_text())["id"]
    return name


def load_file(variant: Path) -> ModuleType:
    """Loads the written kernel as `kernels` 0.17 does."""
    name = name_of(variant)
    spec = spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_by_library(variant: Path) -> ModuleType:
    kernel: ModuleType = import_module("kernels").get_local_kernel(variant.parents[1])
    return kernel


def run_with_library(check: str, variant: Path) -> None:
    """Calls the function `check` of this file in a new process that can import the package `kernels`."""
    assert (LIBRARY / "kernels").is_dir(), f"the package kernels must be in {LIBRARY}: run `make install-dev`"
    path = [LIBRARY, ROOT, ROOT / "kernels"]
    code = f"import sys; from pathlib import Path; from {__name__} import {check}; {check}(Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code, str(variant)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def check_kernel(kernel, variant):
    name = name_of(variant)
    q, k, v = torch.randn(3, 1, 19, 2, 16).unbind()
    results = []
    for function in (flash_attn_func, kernel.flash_attn_func):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with Operators() as seen:
            o = function(*inputs, causal=True)
            o.square().sum().backward()
        results.append(([o, *(x.grad for x in inputs)], {name.split(".")[0] for name in seen.names}))
    (ours, our_names), (theirs, their_names) = results
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "flash_attention" in our_names and name not in our_names
    assert name in their_names and "flash_attention" not in their_names
    assert kernel.rmsnorm.__name__ == f"{name}.rmsnorm"
    loaded = [module.__file__ for key, module in sys.modules.items() if key.startswith(f"{name}.")]
    assert len(loaded) > 20 and all(Path(str(file)).is_relative_to(variant) for file in loaded)

    # older versions of `kernels` import fa_kernels/__init__.py
    older = run_path(str(variant / "fa_kernels" / "__init__.py"))
    assert older["flash_attn_func"] is kernel.flash_attn_func


@pytest.mark.slow
def test_the_kernel_computes_attention_with_operators_of_its_own(variant):
    check_kernel(load_file(variant), variant)


def check_library(variant: Path) -> None:
    check_kernel(load_by_library(variant), variant)
    library = import_module("kernels._rust")
    metadata = library.Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(library.Digest.hash_variant(library.DigestAlgorithm.SHA256, variant))


@pytest.mark.slow
def test_the_library_loads_the_kernel_and_agrees_with_its_digest(variant):
    run_with_library("check_library", variant)


def test_all_architectures_are_listed():
    assert {tuple(map(int, name.split("."))) for name in ARCHITECTURES} == set(device._ARCHITECTURES)


def test_an_import_that_is_not_relocated_is_refused():
    assert relocated("from fa_kernels.a import b", Path("c/d/e.py"), "n") == "from ...a import b"
    assert relocated("from fa_kernels import b", Path("e.py"), "n") == "from . import b"
    with pytest.raises(AssertionError, match=r"e.py: import fa_kernels.a"):
        relocated("import fa_kernels.a", Path("e.py"), "n")


def test_a_folder_with_a_kernel_is_refused(variant):
    with pytest.raises(ValueError, match="must not hold a kernel yet"):
        write_kernel(variant.parents[1])
