"""Test folders mirror source folders, shared code of test modules is in `support` folders, and no file is too long."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

FOLDERS = ("fa_train", "kernels", "scripts", "tests", "docs")
LONGEST = 500  # lines
TEST_MODULE = re.compile(r"\btests(?:\.\w+)*\.test_\w+")
IMPORT = re.compile(r"\bfrom (tests[\w.]*) import (\([^)]*\)|.*)")
# the source folders of tests/kernels and tests/scripts; every other test folder mirrors a folder of fa_train
SOURCE_FOLDERS = {"kernels": "kernels/fa_kernels", "scripts": "scripts"}
NOT_MIRRORED = {"support", "gpu_check", "aot"}  # test folders without a source folder
ACROSS = {"tests/test_resume.py"}  # this file tests whole runs, not one of the modules named resume.py in fa_train/


def python_files(*folders: str) -> list[Path]:
    """Returns paths relative to the repository."""
    return sorted(path.relative_to(REPOSITORY) for name in folders for path in (REPOSITORY / name).rglob("*.py"))


def test_no_python_file_is_too_long():
    files = [Path("train.py"), *python_files(*FOLDERS)]
    lengths = {str(path): len((REPOSITORY / path).read_text().splitlines()) for path in files}
    assert len(lengths) > 400
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_no_code_reads_the_name_of_an_option_from_its_target():
    """Code must read the chosen option of a config group from `choices`, because a user may replace the `_target_`."""
    parses = re.compile(r"_target_\W{0,3}\]?\.(?:endswith|startswith|r?partition|r?split)\(")
    assert parses.search('logger["_target_"].endswith("WandbLogger")')
    found = [
        str(path) for path in python_files("fa_train", "scripts") if parses.search((REPOSITORY / path).read_text())
    ]
    assert not found


def named_test_modules(text: str) -> Iterator[str]:
    """Yields the test modules that a file imports or names in a string, such as a callback's `_target_`."""
    yield from TEST_MODULE.findall(text)
    for package, names in IMPORT.findall(text):
        yield from (f"{package}.{name}" for name in re.findall(r"\btest_\w+", names))


def test_no_module_uses_another_test_module():
    files = python_files("tests")
    found = {
        f"{path} uses {module}"
        for path in files
        for module in named_test_modules((REPOSITORY / path).read_text())
        if module != ".".join(path.with_suffix("").parts)
    }
    assert len(files) > 200
    assert not found, f"move what is shared into a support folder: {sorted(found)}"


def misplaced(path: Path, sources: Sequence[Path]) -> str | None:
    """Returns why a file in tests/ is in the wrong folder, or None. All paths are relative to the repository.

    A test folder mirrors a source folder. If a module is in a subfolder of the source folder, the module's tests belong
    in the test subfolder of the same name. For example, the tests of fa_train/parallel/context/deal.py belong in
    tests/parallel/context. In tests/parallel, the file test_deal.py would be misplaced, because deal.py is in the
    subfolder. In tests/parallel, the files test_context.py and test_context_*.py would be misplaced, because they have
    the name of the subfolder. If a source folder contains x.py, the mirroring test folder is always allowed to contain
    test_x.py.
    """
    parts = path.parent.parts[1:]
    if NOT_MIRRORED & {*parts} or path.as_posix() in ACROSS:
        return None
    first = SOURCE_FOLDERS.get(parts[0]) if parts else None
    folder = Path(first, *parts[1:]) if first else Path("fa_train", *parts)
    if all(module.parent != folder for module in sources):
        return f"{path}: {folder} has no modules"
    name = path.stem.removeprefix("test_")
    if folder / f"{name}.py" in sources:
        return None
    for module in sources:
        if folder in module.parent.parents:
            subfolder = module.relative_to(folder).parts[0]
            if module.stem == name or name == subfolder or name.startswith(f"{subfolder}_"):
                return f"{path} tests {module}"
    return None


def test_test_folders_mirror_source_folders():
    sources = python_files("fa_train", "kernels/fa_kernels", "scripts")
    found = [reason for path in python_files("tests") if (reason := misplaced(path, sources))]
    assert len(sources) > 200
    assert not found, f"mirror the source folders, or name an exception in this file: {found}"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param("tests/parallel/context/test_deal.py", None, id="mirrored"),
        pytest.param("tests/kernels/flash_attention/hopper/test_configs.py", None, id="several-modules"),
        pytest.param("tests/kernels/hopper/test_queue.py", "fa_kernels/hopper has no modules", id="no-such-folder"),
        pytest.param("tests/parallel/test_deal.py", "tests fa_train/parallel/context/deal.py", id="module-below"),
        pytest.param("tests/parallel/test_context_on_gpus.py", "tests fa_train/parallel/context/", id="folder-below"),
    ],
)
def test_a_misplaced_test_module_is_found(path, reason):
    found = misplaced(Path(path), python_files("fa_train", "kernels/fa_kernels", "scripts"))
    assert found is None if reason is None else reason in str(found)
