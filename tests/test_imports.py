"""Tests imports of `fa_kernels` from any folder, and together with Hugging Face's package named `kernels`."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from setuptools import find_packages

REPOSITORY = Path(__file__).parents[1]
CHECKOUT = REPOSITORY, REPOSITORY / "kernels"  # PYTHONPATH=.:kernels adds these folders
FOUND = find_spec("kernels")  # a namespace package has no origin
TRAINING_LIBRARIES = {"fa_train", "lightning", "hydra", "transformers", "datasets", "wandb"}


def run_python(code: str, cwd: Path, *path: Path) -> list[str]:
    """Runs code in a new interpreter and returns the words that it prints.

    `path`: the first folders of the interpreter's search path.
    """
    paths = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_packages_import_from_any_folder_and_kernels_bring_no_training_library(tmp_path: Path) -> None:
    code = f"""
import sys, fa_kernels
print(",".join({TRAINING_LIBRARIES} & sys.modules.keys()) or "none", fa_kernels.__file__)
import fa_train
print(fa_train.__file__)
import fa_train.integrations.transformers
print("transformers" in sys.modules)
"""
    libraries, *files, has_transformers = run_python(code, tmp_path)
    assert libraries == "none" and has_transformers == "False"
    assert [Path(file).parent for file in files] == [REPOSITORY / "kernels" / "fa_kernels", REPOSITORY / "fa_train"]


def test_wheels_carry_no_package_named_kernels() -> None:
    find = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = [
        name for where in find["where"] for name in find_packages(str(REPOSITORY / where), include=find["include"])
    ]
    assert {name.partition(".")[0] for name in found} == {"fa_kernels", "fa_train"}
    assert not (REPOSITORY / "kernels" / "__init__.py").exists(), "it would hide other packages of its name"


@pytest.mark.slow
@pytest.mark.skipif(FOUND is not None and FOUND.origin is not None, reason="a package named kernels is installed")
def test_transformers_does_not_take_the_folder_for_hugging_faces_package(tmp_path: Path) -> None:
    code = """
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import fa_kernels, kernels
print(is_kernels_available(), kernels.__file__)
"""
    assert run_python(code, tmp_path, *CHECKOUT) == ["False", "None"]


@pytest.mark.slow
def test_a_package_named_kernels_imports_next_to_ours(tmp_path: Path) -> None:
    stub = tmp_path / "site" / "kernels"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    code = f"""
import os, sys
import torch, triton  # once for both orders
for folders in ({[*map(str, CHECKOUT), str(stub.parent)]}, {[str(stub.parent), *map(str, CHECKOUT)]}):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    sys.path[:] = folders + sys.path
    import fa_kernels, transformers, kernels
    print(kernels.__file__, fa_kernels.flash_attn_func.__module__, flush=True)
    os._exit(0)
"""
    expected = [str(stub / "__init__.py"), "fa_kernels.flash_attention.interface"]
    assert run_python(code, tmp_path) == expected * 2
