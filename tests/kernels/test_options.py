"""Every launch passes OPTIONS."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.training import REPOSITORY


def launches() -> Iterator[tuple[Path, ast.Call]]:
    """Yields each `kernel[grid](...)` in the source code."""
    for folder in ("kernels", "fa_train"):
        for path in Path(REPOSITORY, folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    kernel = node.func.value
                    if isinstance(kernel, ast.Name) and kernel.id.endswith("kernel"):
                        yield path, node


def test_every_launch_passes_the_compile_options():
    found = [*launches()]
    assert len(found) >= 13
    for path, call in found:
        unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
        assert "OPTIONS" in unpacked, f"{path}, line {call.lineno}: {ast.unparse(call)}"
