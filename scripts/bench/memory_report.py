"""The tables of scripts/bench/memory.py."""

import statistics
from collections.abc import Sequence

from scripts.bench.memory_cases import OFF, Lever, Row, levers_of
from scripts.bench.page import header, shown


def slowdown(row: Row, lever: Lever, rows: Sequence[Row]) -> float | None:
    """Returns the fraction by which `lever` lengthens a step that also uses all other levers of `row`.

    For example, 0.1 means that a step takes 10% longer with `lever` than without. Returns None if `row` does not use
    `lever`, or if the step time with or without `lever` was not measured.
    """
    other = levers_of(row.combination).without(lever)
    without = next((r for r in rows if other and r.combination == other.name and r.seq_len == row.seq_len), None)
    if without is None or not row.step_ms or not without.step_ms:
        return None
    return statistics.median(row.step_ms) / statistics.median(without.step_ms) - 1


def markdown(rows: Sequence[Row], left: Sequence[str], head: dict[str, str]) -> str:
    """Formats the page: its header, the slowdown by each lever at each length, and all measurements."""
    seq_lens = list(dict.fromkeys(row.seq_len for row in rows))
    lines = header("What each memory lever costs", head)
    lines += ["Slowdown: the median step time relative to the same combination without the lever, minus 1.", ""]
    lines += [f"| lever | combination | {' | '.join(f'{n:,} tokens' for n in seq_lens)} |"]
    lines += ["|:--|:--|" + "--:|" * len(seq_lens)]
    for lever in OFF:
        for name in dict.fromkeys(row.combination for row in rows):
            of_name = {row.seq_len: row for row in rows if row.combination == name}
            found = [slowdown(of_name[n], lever, rows) if n in of_name else None for n in seq_lens]
            if any(value is not None for value in found):
                lines.append(f"| {lever} | {name} | {' | '.join(shown(value, '+.1%') for value in found)} |")
    lines += [
        "",
        "ms: median of the timed steps (fastest to slowest). optimizer: the optimizer's part of the step.",
        "",
    ]
    lines += ["| seq_len | combination | ms | optimizer ms | peak GiB | host GiB | loss | note |"]
    lines += ["|--:|:--|--:|--:|--:|--:|--:|:--|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    if left:
        lines += ["", f"Not measured within the budget: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    """Returns the cells of one line in the table of all measurements."""
    times = "–"
    if row.step_ms:
        spread = f"{min(row.step_ms):,.1f} to {max(row.step_ms):,.1f}, {len(row.step_ms)} steps"
        times = f"{statistics.median(row.step_ms):,.1f} ({spread})"
    return [
        f"{row.seq_len:,}",
        row.combination,
        times,
        shown(statistics.median(row.optimizer_ms) if row.optimizer_ms else None, ",.1f"),
        shown(row.peak_gib, ".2f"),
        shown(row.host_gib, ".2f"),
        shown(row.loss, ".4f"),
        "" if row.outcome == "ok" else row.outcome.replace("|", "/"),
    ]
