"""`fa_kernels` imports from any folder, and next to a package named `kernels`: Hugging Face publishes one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("imports")
REPOSITORY = Path(__file__).parents[1]
TRAINING_LIBRARIES = {"fa_train", "lightning", "hydra", "transformers", "datasets", "wandb"}


def run_python(code: str, cwd: Path, *path: Path) -> list[str]:
    """Returns the words that a new interpreter prints. `path` comes first on its search path, in this order."""
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


def test_packages_import_from_any_folder_and_kernels_bring_no_training_library(tmp_path: Path) -> None:
    code = f"""
import sys, fa_kernels
print(",".join({TRAINING_LIBRARIES} & sys.modules.keys()) or "none", fa_kernels.__file__)
import fa_train
print(fa_train.__file__)
"""
    libraries, *files = run_python(code, tmp_path)
    assert libraries == "none"
    assert [Path(file).parent for file in files] == [REPOSITORY / "kernels" / "fa_kernels", REPOSITORY / "fa_train"]


def test_the_folder_kernels_is_no_package() -> None:
    """A folder without __init__.py gives way to any package of its name, wherever that stands on sys.path."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("ours_first", [True, False], ids=["checkout-first", "stub-first"])
@pytest.mark.parametrize("imports", ["fa_kernels, transformers, kernels", "kernels, transformers, fa_kernels"])
def test_a_package_named_kernels_imports_next_to_ours(ours_first: bool, imports: str, tmp_path: Path) -> None:
    stub = tmp_path / "site" / "kernels"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    checkout = [REPOSITORY, REPOSITORY / "kernels"]
    path = [*checkout, stub.parent] if ours_first else [stub.parent, *checkout]
    code = f"import {imports}; print(kernels.__file__, fa_kernels.flash_attn_func.__module__)"
    file, module = run_python(code, tmp_path, *path)
    assert Path(file) == stub / "__init__.py"
    assert module == "fa_kernels.flash_attention.interface"
