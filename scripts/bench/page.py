"""Formats the parts that results pages share."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def header(title: str, head: Mapping[str, str]) -> list[str]:
    """Returns the first lines of a results page: its title and the facts in `head`, each followed by an empty line."""
    return [f"# {title}", "", *(f"- {key}: `{value}`" for key, value in head.items()), ""]


def shown(value: float | None, form: str) -> str:
    """Formats a number for a table, or returns a dash if the number is not known."""
    return "–" if value is None else format(value, form)


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def write_csv(kind: type[Any], rows: Sequence[Any], path: Path) -> None:
    """Writes rows of a dataclass `kind` to a CSV file, which has a column for each field."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
