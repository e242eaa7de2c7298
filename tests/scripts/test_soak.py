"""scripts/soak.py distinguishes a steady run from one that slows down and from one that needs more and more memory."""

import subprocess
import sys
import time

import pytest

from scripts import soak

MIB = 2**20


def metrics(tmp_path, step_ms, reserved_gib=None):
    """Writes a metrics.csv.

    After each training row comes a validation row, which has no values in the training columns.
    """
    lines = ["step,perf/step_ms,perf/reserved_gib,val/loss"]
    for step, ms in enumerate(step_ms):
        lines += [f"{step},{ms},{'' if reserved_gib is None else reserved_gib[step]},", f"{step},,,2.5"]
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


STEADY = [900.0, 300.0, 100.0, *[100.0, 101.0, 99.0] * 2]


@pytest.mark.parametrize(
    ("step_ms", "host", "reserved", "wrong"),
    [
        pytest.param(STEADY, [2.0] * 9, [5.0] * 9, set(), id="steady"),
        pytest.param(STEADY, [1.0, 1.5, *[2.0] * 7], None, set(), id="warms-up-on-a-cpu"),
        pytest.param(
            STEADY, [2.0, *[2.0, 3.5, 3.5, 2.0] * 2], None, set(), id="checkpoints-need-memory-for-a-short-time"
        ),
        pytest.param([100.0] * 6 + [104.0] * 3, [2.0] * 9, [5.0] * 9, {"step_ms"}, id="slows-down"),
        pytest.param(STEADY, [1 + 0.02 * i for i in range(9)], [5.0] * 9, {"host_gib"}, id="host-memory-leaks"),
        pytest.param(STEADY, [2.0] * 9, [5.0] * 6 + [5.1] * 3, {"reserved_gib"}, id="gpu-memory-grows"),
    ],
)
def test_changes_are_found(step_ms, host, reserved, wrong, tmp_path):
    found = soak.changes(metrics(tmp_path, step_ms, reserved), host)
    assert {change.name for change in found if not change.is_small} == wrong
    assert [change.name for change in found] == ["step_ms", "host_gib", *(["reserved_gib"] if reserved else [])]


def test_a_run_that_is_too_short_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="at least nine samples; got 8"):
        soak.changes(metrics(tmp_path, STEADY), [1.0] * 8)


def test_memory_is_that_of_all_processes_of_the_session():
    held = f"x = bytearray({100 * MIB}); print('ready', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"ready\n"
    assert 100 * MIB < soak.memory_of_session(process.pid) < 200 * MIB
    process.communicate(b"\n", timeout=10)
    time.sleep(0.1)
    assert soak.memory_of_session(process.pid) == 0


@pytest.mark.slow
def test_a_run_that_ends_by_itself_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="must train until it is interrupted; it ended with 1"):
        soak.soak(["seq_len=foo"], 1.0, tmp_path / "run")
