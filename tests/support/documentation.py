"""The pages of the documentation and the commands that they show."""

import re
import shlex
from pathlib import Path

from tests.support.processes import REPOSITORY

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
GUIDES = [*PAGES, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each command in a code block or in backticks.

    A `…` at the start of a command is replaced by the words of the previous command.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"^```python\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(?:    )?((?:python3?|make|torchrun|…) .+)$|`((?:python|make) [^`]+)`", text, re.MULTILINE)
    lines: list[list[str]] = []
    for block, inline in found:
        words = shlex.split(block or inline, comments=True)
        before = lines[-1] if words[0] == "…" else []
        lines.append(before + [word for word in words if word != "…"])
    return lines
