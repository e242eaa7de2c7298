"""The top-level package `kernels` must live beside the Hugging Face package of the same name."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("import kernels, transformers", id="kernels-first"),
        pytest.param("import transformers, kernels", id="transformers-first"),
    ],
)
def test_kernels_is_ours_beside_transformers(order: str, tmp_path: Path) -> None:
    # the model class makes transformers load its own integration of Hugging Face kernels
    code = (
        f"{order}\nfrom transformers import LlamaForCausalLM\n"
        "print(kernels.flash_attn_func.__module__, kernels.__file__)"
    )
    module, file = run_python(code, cwd=tmp_path).split()[-2:]
    assert module.startswith("kernels.flash_attention")
    assert Path(file) == REPOSITORY / "kernels" / "__init__.py"


def test_installed_packages_import_from_any_folder(tmp_path: Path) -> None:
    code = "import fa_train, kernels\nprint(fa_train.__file__, kernels.__file__)"
    assert [Path(file).parents[1] for file in run_python(code, cwd=tmp_path).split()] == [REPOSITORY, REPOSITORY]


def test_kernels_imports_no_training_library(tmp_path: Path) -> None:
    code = (
        "import sys, kernels\n"
        "print({'fa_train', 'lightning', 'hydra', 'transformers', 'datasets', 'wandb'} & sys.modules.keys())"
    )
    assert run_python(code, cwd=tmp_path) == "set()"
