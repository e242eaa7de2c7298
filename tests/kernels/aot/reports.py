"""Runs the modules that compile kernels without a GPU in separate processes, and caches their reports."""

import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".pytest_cache" / "ahead_of_time"
RECORDED = Path(__file__).with_name("recorded")  # the folder has a file for each Triton version

Reports = dict[str, dict[str, Any]]


def compile_all(module: str, cases: Sequence[str]) -> Reports:
    """Returns the reports of `module` in the order of the cases.

    A recorded or cached report is used if the source of its kernel has not changed.
    """
    fresh = fresh_reports(module)
    files = {case: cache_file(module, case) for case in cases if case not in fresh}
    kept = fresh | {case: report for case, file in files.items() if (report := read(file)) is not None}
    new = compile_in_processes(module, [case for case in cases if case not in kept])
    for case, report in new.items():
        write(files[case], report)
    return {case: (kept | new)[case] for case in cases}


def cache_file(module: str, case: str) -> Path:
    return CACHE / triton.__version__ / module / f"{case}.json"


def compile_in_processes(module: str, cases: Sequence[str]) -> Reports:
    """Compiles the cases in new processes, with Triton's interpreter off.

    With n workers of pytest-xdist, each worker starts at most (number of CPU cores) / n processes, but at least one.
    """
    if not cases:
        return {}
    cores = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    n_parts = min(max(cores, 1), len(cases))
    parts = [cases[first::n_parts] for first in range(n_parts)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *part],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    reports: Reports = {}
    for process, part in zip(processes, parts, strict=True):
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        reports |= dict(zip(part, map(json.loads, out.splitlines()), strict=True))
    return reports


def environment() -> dict[str, str]:
    """Returns the environment of a process that compiles the kernels of this checkout, not those of an installed
    copy.
    """
    path = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def read(file: Path) -> dict[str, Any] | None:
    """Returns the report in a file, or None if the file is missing or its key differs from `key()`."""
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    return kept["report"] if kept["key"] == key() else None


def write(file: Path, report: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")  # other workers must never see an incomplete report
    partial.write_text(json.dumps({"key": key(), "report": report}))
    partial.replace(file)


@functools.cache
def fresh_reports(module: str) -> Reports:
    """Returns the recorded reports of `module` for this Triton version and the current source code."""
    known = recorded().get(module, {})
    hashes = source_hashes().get(module, {}) if known else {}
    stale = [case for case, report in known.items() if report["source"] != hashes[case]]
    if stale:
        warnings.warn(f"{module}: kernels changed, so {len(stale)} are compiled: run `make aot-reports`", stacklevel=2)
    return {case: without_source(report) for case, report in known.items() if case not in stale}


def without_source(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "source"}


@functools.cache
def recorded() -> dict[str, Reports]:
    """Returns the recorded reports of each module for this Triton version."""
    file = RECORDED / f"{triton.__version__}.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    if found["key"] != recorded_key():
        warnings.warn(f"reports changed since {file.name}, so all are made: run `make aot-reports`", stacklevel=2)
        return {}
    reports: dict[str, Reports] = found["reports"]
    return reports


@functools.cache
def source_hashes() -> dict[str, dict[str, str]]:
    """Returns {module: {case: hash of the case's current source code}} for all recorded cases."""
    file = CACHE / triton.__version__ / "sources.json"
    kept = read(file)
    if kept is None:
        kept = hashes_of({module: [*reports] for module, reports in recorded().items()})
        write(file, kept)
    return kept


def hashes_of(cases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Returns {module: {case: hash of the case's source code}} for the given cases."""
    names = [f"{module.rpartition('.')[2]}:{case}" for module, some in cases.items() for case in some]
    found = compile_in_processes("tests.kernels.aot.sources", names)
    return {
        module: {case: found[f"{module.rpartition('.')[2]}:{case}"]["source"] for case in some}
        for module, some in cases.items()
    }


def record() -> Path:
    """Writes all fresh and all cached reports to the file of recorded reports."""
    reports: dict[str, Reports] = {module: dict(fresh_reports(module)) for module in recorded()}
    for file in sorted((CACHE / triton.__version__).glob("*/*.json")):
        if (report := read(file)) is not None:
            reports.setdefault(file.parent.name, {})[file.stem] = report
    hashes = hashes_of({module: [*of_module] for module, of_module in reports.items()})
    full = {
        module: {case: {"source": hashes[module][case]} | report for case, report in of_module.items()}
        for module, of_module in reports.items()
    }
    RECORDED.mkdir(exist_ok=True)
    result = RECORDED / f"{triton.__version__}.json"
    content = json.dumps({"key": recorded_key(), "reports": full}, indent=1, sort_keys=True)
    result.write_text(content + "\n")
    return result


def recorded_key() -> str:
    """Returns a hash of the modules that make reports. Comments and docstrings do not change the hash.

    The hash is the same on every machine. The hash does not depend on Triton's version, because the reports of each
    Triton version are in a separate file.
    """
    modules = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))
    code = [(path.name, code_of(path.read_text())) for path in modules]
    return hashlib.sha256(repr((code, compiler_variables())).encode()).hexdigest()


def code_of(source: str) -> str:
    """Returns Python code in a normal form, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def compiler_variables() -> dict[str, str]:
    """Returns the environment variables that change how kernels are compiled."""
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TRITON_", "PTXAS_"))}
    variables.pop("TRITON_INTERPRET", None)
    return variables


@functools.cache
def key() -> str:
    """Returns a hash of everything (except the case itself) that determines a report."""
    settings = [compiler_variables(), sorted(get_cache_invalidating_env_vars().items()), torch.__version__, sys.version]
    return hash_of(ROOT, installed_files(), settings)


def hash_of(root: Path, installed: Iterable[Path], settings: Any) -> str:
    """Hashes source files by content, installed files by size and modification time, and settings by their repr."""
    contents = [(str(path.relative_to(root)), path.read_text()) for path in sources(root)]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in installed]
    return hashlib.sha256(repr((contents, stats, settings)).encode()).hexdigest()


def sources(root: Path) -> list[Path]:
    """Returns all files of the kernels, all files directly in tests/, and the helper modules in tests/kernels."""
    helpers = [path for path in root.glob("tests/kernels/**/*.py") if not path.name.startswith("test_")]
    return sorted([*root.glob("kernels/**/*.py"), *root.glob("tests/*.py"), *helpers])


def installed_files() -> list[Path]:
    """Returns all files of Triton, and the CUDA tools that compile and disassemble kernels."""
    tools = [Path(tool.path) for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell, knobs.nvidia.nvdisasm)]
    package = [path for path in Path(triton.__file__).parent.rglob("*.*") if path.suffix != ".pyc"]
    return sorted({*tools, *package})


if __name__ == "__main__":
    print(record().relative_to(ROOT))
