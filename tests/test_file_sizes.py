"""A Python file has at most 500 lines, so that it is easy to read."""

from tests.support.processes import REPOSITORY

FOLDERS = ("fa_train", "kernels", "scripts", "tests", "docs")
LONGEST = 500  # lines


def test_no_python_file_is_too_long():
    files = [REPOSITORY / "train.py", *(path for name in FOLDERS for path in (REPOSITORY / name).rglob("*.py"))]
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 400
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
