"""The top-level package `kernels` must live beside the Hugging Face package of the same name."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("imports")
REPOSITORY = Path(__file__).parents[1]


def run_python(code: str, cwd: Path) -> list[str]:
    """What a new interpreter prints last, word by word."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def kernels_first(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Who else came with kernels; then, as in transformers_first, what kernels is; then where the packages are from."""
    # the model class makes transformers load its own integration of Hugging Face kernels
    code = """
import sys, kernels
others = {"fa_train", "lightning", "hydra", "transformers", "datasets", "wandb"} & sys.modules.keys()
import transformers
from transformers import LlamaForCausalLM
import fa_train
print(",".join(others) or "none", kernels.flash_attn_func.__module__, kernels.__file__, fa_train.__file__)
"""
    return run_python(code, tmp_path_factory.mktemp("elsewhere"))[-4:]


@pytest.fixture(scope="module")
def transformers_first(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    code = """
import transformers, kernels
from transformers import LlamaForCausalLM
print("-", kernels.flash_attn_func.__module__, kernels.__file__)
"""
    return run_python(code, tmp_path_factory.mktemp("elsewhere"))[-3:]


@pytest.mark.parametrize("order", ["kernels_first", "transformers_first"])
def test_kernels_is_ours_beside_transformers(order: str, request: pytest.FixtureRequest) -> None:
    _, module, file, *_ = request.getfixturevalue(order)
    assert module.startswith("kernels.flash_attention")
    assert Path(file) == REPOSITORY / "kernels" / "__init__.py"


def test_installed_packages_import_from_any_folder(kernels_first: list[str]) -> None:
    assert [Path(file).parents[1] for file in kernels_first[2:]] == [REPOSITORY, REPOSITORY]


def test_kernels_imports_no_training_library(kernels_first: list[str]) -> None:
    assert kernels_first[0] == "none"
