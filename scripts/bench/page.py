"""Formats the parts that results pages share."""

from collections.abc import Mapping


def header(title: str, head: Mapping[str, str]) -> list[str]:
    """Returns the first lines of a results page: its title and the facts in `head`, each followed by an empty line."""
    return [f"# {title}", "", *(f"- {key}: `{value}`" for key, value in head.items()), ""]
