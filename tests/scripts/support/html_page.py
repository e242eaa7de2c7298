"""Finds what an HTML page would load."""

from html.parser import HTMLParser


class References(HTMLParser):
    """Collects the tags of an HTML page, and the addresses that the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str | None] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def assert_self_contained(html: str) -> References:
    """Returns the tags of a page. Asserts that the page loads nothing from other hosts or other files."""
    parser = References()
    parser.feed(html)
    parser.close()
    assert parser.targets and all(target is not None and target.startswith("data:") for target in parser.targets)
    assert "script" not in parser.tags and "@import" not in html and "url(" not in html
    return parser
