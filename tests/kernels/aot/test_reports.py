"""A cached compile report is reused only if a new compilation would give an equal report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.aot import reports

MODULES = [
    f"tests.kernels.aot.{name}" for name in ("portable", "decode", "hopper_forward", "hopper_backward", "schedule")
]
# code for a new process in which kernels are not interpreted
IMPORTED = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*(module.__file__ for module in [*sys.modules.values()] if getattr(module, "__file__", None)), sep="\\n")
"""
SOURCES: dict[str, str] = {}  # maps <module>:<case> to the hash of the case's source


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Replaces the compilers by a stub and returns the list of cases that the compilers were asked to compile."""
    cases = []

    def compile_in_processes(module, part):
        if module == "tests.kernels.aot.sources":
            return {name: {"source": SOURCES.get(name, "the first source")} for name in part}
        cases.extend(part)
        return {case: {"case": case, "registers": len(cases)} for case in part}

    monkeypatch.setattr(reports, "CACHE", tmp_path)
    monkeypatch.setattr(reports, "RECORDED", tmp_path / "recorded")
    monkeypatch.setitem(SOURCES, "module:a", "the first source")
    forget()
    monkeypatch.setattr(reports, "compile_in_processes", compile_in_processes)
    monkeypatch.setattr(reports, "key", lambda: "first")
    yield cases
    forget()


def forget():
    for cached in (reports.recorded, reports.fresh_reports, reports.source_hashes):
        cached.cache_clear()


def start_elsewhere(monkeypatch, folder):
    """Replaces the folder of cached reports and empties all caches, so that the test goes on as if in a new process."""
    monkeypatch.setattr(reports, "CACHE", folder)
    forget()


def test_a_second_run_compiles_nothing(compiled):
    first = reports.compile_all("module", ["a", "b"])
    assert reports.compile_all("module", ["b", "a"]) == first
    assert list(reports.compile_all("module", ["b", "c", "a"])) == ["b", "c", "a"]
    assert compiled == ["a", "b", "c"]


def test_a_report_of_another_key_or_module_is_not_used(compiled, monkeypatch):
    reports.compile_all("module", ["a"])
    reports.compile_all("another", ["a"])
    monkeypatch.setattr(reports, "key", lambda: "second")
    assert reports.compile_all("module", ["a"])["a"]["registers"] == 3
    assert compiled == ["a", "a", "a"]


def test_recorded_reports_are_used_while_the_source_is_unchanged(compiled, monkeypatch, tmp_path):
    first = reports.compile_all("module", ["a", "b"])
    reports.record()
    start_elsewhere(monkeypatch, tmp_path / "empty")
    assert reports.compile_all("module", ["b", "a"]) == first
    assert compiled == ["a", "b"]
    assert reports.compile_all("module", ["a", "c"]).keys() == {"a", "c"}, "c is not recorded"
    assert compiled == ["a", "b", "c"]
    SOURCES["module:a"] = "another source"
    start_elsewhere(monkeypatch, tmp_path / "empty again")
    with pytest.warns(UserWarning, match="make aot-reports"):
        assert reports.compile_all("module", ["a", "b"])["b"] == first["b"]
    assert compiled == ["a", "b", "c", "a"], "only a changed"
    reports.record()
    start_elsewhere(monkeypatch, tmp_path / "empty once more")
    reports.compile_all("module", ["a", "b"])
    assert compiled == ["a", "b", "c", "a"], "both are recorded"


def test_other_code_that_makes_reports_makes_them_again(compiled, monkeypatch, tmp_path):
    reports.compile_all("module", ["a"])
    reports.record()
    monkeypatch.setattr(reports, "recorded_key", lambda: "of other code")
    start_elsewhere(monkeypatch, tmp_path / "empty")
    with pytest.warns(UserWarning, match="make aot-reports"):
        reports.compile_all("module", ["a"])
    assert compiled == ["a", "a"]


@pytest.mark.slow
def test_only_code_changes_the_key_of_recorded_reports(monkeypatch):
    code = 'def f(x):\n    """Doc."""\n    return x + 1\n'
    same = 'def f(x):  # a comment\n    """Another\n    text."""\n\n    return x+1\n'
    assert reports.code_of(same) == reports.code_of(code)
    assert reports.code_of(code.replace("1", "2")) != reports.code_of(code)
    before = reports.recorded_key()
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")
    assert reports.recorded_key() != before


@pytest.mark.parametrize("path", ["kernels/fa_kernels/a.py", "kernels/b/__init__.py", "tests/kernels/support/aot.py"])
def test_the_key_depends_on_every_source(tmp_path, path):
    sources = [tmp_path / name for name in ("kernels/fa_kernels/other.py", "tests/kernels/aot/portable.py")]
    for file in (*sources, tmp_path / path):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    keys = [reports.hash_of(tmp_path, [], [])]
    (tmp_path / path).write_text("x = 2\n")
    keys.append(reports.hash_of(tmp_path, [], []))
    (tmp_path / path).rename((tmp_path / path).with_name("renamed.py"))
    keys.append(reports.hash_of(tmp_path, [], []))
    (tmp_path / path).with_name("renamed.py").unlink()
    keys.append(reports.hash_of(tmp_path, [], []))
    assert len({*keys}) == 4


def test_the_key_depends_on_the_compilers(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("12.8")
    before = reports.hash_of(tmp_path, [tool], [])
    assert reports.hash_of(tmp_path, [tool], ["PTXAS_OPTIONS"]) != before
    os.utime(tool, (1, 1))
    assert reports.hash_of(tmp_path, [tool], []) != before
    names = {path.name for path in reports.installed_files()}
    assert names >= {"libtriton.so", "ptxas", "ptxas-blackwell", "nvdisasm", "semantic.py"}


@pytest.mark.slow
def test_every_file_that_a_compile_imports_is_a_source():
    root, environment = reports.ROOT, reports.environment()
    command = [sys.executable, "-c", IMPORTED, *MODULES]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    ours = {path for path in map(Path, run.stdout.split()) if path.is_relative_to(root) and ".venv" not in path.parts}
    assert root / "kernels" / "fa_kernels" / "__init__.py" in ours
    assert ours <= {*reports.sources(root)}


def test_half_a_report_is_never_read(tmp_path):
    file = tmp_path / "module" / "a.json"
    reports.write(file, {"case": "a"})
    assert reports.read(file) == {"case": "a"} and os.listdir(file.parent) == ["a.json"]
    file.write_text(json.dumps({"key": "another", "report": {}}))
    assert reports.read(file) is None
