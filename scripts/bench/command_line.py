"""Defines the command-line options that the benchmarks share."""

import argparse
import math
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def add_results(parser: argparse.ArgumentParser, default: Path | str, kind: str = "prefix") -> None:
    """Adds --commit and --out.

    default: a path, or a path pattern such as scripts/results/host_<gpu>_<yyyymm>. If `default` is a path pattern and
    the user does not set --out, the value of --out is None.
    """
    path = default if isinstance(default, Path) else None
    parser.add_argument("--commit", help="commit to show in the results; default: that of the git checkout")
    parser.add_argument("--out", type=Path, default=path, help=f"{kind} of the result files; default: {shown(default)}")


def add_time_limits(parser: argparse.ArgumentParser, timeout: float | None = None, budget: bool = False) -> None:
    """Adds the options --timeout (limit of one case) and --budget (limit of all cases)."""
    if timeout is not None:
        parser.add_argument("--timeout", type=float, default=timeout, help="maximum seconds per case")
    if budget:
        parser.add_argument(
            "--budget",
            type=float,
            default=math.inf,
            help="seconds after which no further case starts; default: no limit",
        )


def sigterm_raises() -> None:
    """Makes SIGTERM raise SystemExit, so that a benchmark also ends the processes that it has started.

    `timeout` and SLURM end a program with SIGTERM. By default, SIGTERM would end only the benchmark's own process.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def require_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> None:
    """Ends the program with a message if one of the named options, or an item of a list option, is not positive."""
    for name in names:
        found = getattr(args, name)
        if any(value <= 0 for value in (found if isinstance(found, list) else [found])):
            parser.error(f"--{name.replace('_', '-')} must be positive; got {found}")


def require_overrides(parser: argparse.ArgumentParser, overrides: Sequence[str], name: str = "overrides") -> None:
    """Ends the program with a message if one of Hydra's overrides does not have the form name=value."""
    if malformed := [override for override in overrides if "=" not in override]:
        parser.error(f"{name} must be name=value; got {' '.join(malformed)}")


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with Hydra's overrides before all other arguments.

    The overrides come first because an option with several values would take overrides that follow it as values.
    """
    ordered: list[str] = sorted(arguments, key=lambda argument: re.match(r"[\w.+~@/]+=", argument) is None)
    return ordered


def shown(path: Path | str) -> str:
    """Returns a path as text for a help message: relative to the repository's root if the path is in the repository."""
    if isinstance(path, Path) and path.is_relative_to(REPOSITORY):
        path = path.relative_to(REPOSITORY)
    return str(path)
