"""Every Python file has at most 500 lines, and what several test modules use is in `support` folders."""

import re
from collections.abc import Iterator

from tests.support.processes import REPOSITORY

FOLDERS = ("fa_train", "kernels", "scripts", "tests", "docs")
LONGEST = 500  # lines
TEST_MODULE = re.compile(r"\btests(?:\.\w+)*\.test_\w+")
IMPORT = re.compile(r"\bfrom (tests[\w.]*) import (\([^)]*\)|.*)")


def test_no_python_file_is_too_long():
    files = [REPOSITORY / "train.py", *(path for name in FOLDERS for path in (REPOSITORY / name).rglob("*.py"))]
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 400
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def named_test_modules(text: str) -> Iterator[str]:
    """Yields the test modules that a file imports or names in a string, such as a callback's `_target_`."""
    yield from TEST_MODULE.findall(text)
    for package, names in IMPORT.findall(text):
        yield from (f"{package}.{name}" for name in re.findall(r"\btest_\w+", names))


def test_no_module_uses_another_test_module():
    files = [*(REPOSITORY / "tests").rglob("*.py")]
    found = {
        f"{path.relative_to(REPOSITORY)} uses {module}"
        for path in files
        for module in named_test_modules(path.read_text())
        if module != ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    }
    assert len(files) > 200
    assert not found, f"move what is shared into a support folder: {sorted(found)}"
