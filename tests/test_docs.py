"""Every fragment of Python in docs/ runs, in order, in one namespace a page."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def fragments(page: Path) -> list[str]:
    """The fenced blocks of Python, each preceded by empty lines so that errors name the page's own line."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_fragment_runs(page):
    namespace: dict[str, object] = {}
    assert len(fragments(page)) > 0
    for fragment in fragments(page):
        exec(compile(fragment, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, Path(__file__).parents[1] / "README.md"], ids=lambda page: page.stem)
def test_every_link_within_the_repository_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (page.parent / link).exists(), link
