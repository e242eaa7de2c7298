"""scripts/soak.py distinguishes a steady run from a run that slows down, and from a run that needs more and more
memory.
"""

import mmap
import subprocess
import sys
import time

import pytest

from scripts import soak

MIB = 2**20


def metrics(tmp_path, step_ms, reserved_gib=None):
    """Writes a metrics.csv, in which rows of validations have no values in the training columns."""
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


HOLDS = f"""
import mmap, os, subprocess, sys
file = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
sum(file[:: mmap.PAGESIZE])
written = bytearray({60 * MIB})
shared = mmap.mmap(-1, {40 * MIB})
shared.write(bytes({40 * MIB}))
forked = os.fork()
if not forked:
    sys.stdin.read()
else:
    program = "import sys; x = bytearray({30 * MIB}); print('ready', flush=True); sys.stdin.read()"
    subprocess.run([sys.executable, "-c", program])
"""


def test_memory_is_that_of_all_processes_of_the_session(tmp_path):
    path = tmp_path / "tokens"
    path.write_bytes(bytes(100 * MIB))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"ready\n"
    before = soak.Sample(0.0, soak.memory_of_session(process.pid))
    assert [x.process for x in before.processes] == [soak.TRAINING, soak.WORKERS, soak.OTHERS]
    training, worker, other = (x.anonymous_gib * 1024 for x in before.processes)
    # in MiB: the training process and the worker share 60 MiB, so each of them counts 30 MiB
    assert 30 < training < 45 and 30 < worker < 45 and 30 < other < 45
    assert before.host_gib * 1024 == pytest.approx(training + worker + other + 40, abs=1)

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        sum(pages[:: mmap.PAGESIZE])  # reads each page of `path` in the test's process, whose memory is not measured
        after = soak.Sample(5.0, soak.memory_of_session(process.pid))
    assert (before.total("files_gib") - after.total("files_gib")) * 1024 == pytest.approx(50, abs=5)
    assert (before.host_gib - after.host_gib) * 1024 == pytest.approx(0, abs=1)

    process.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while soak.memory_of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # the forked process may end later than the first one
    assert soak.memory_of_session(process.pid) == []


def test_the_memory_of_each_process_is_written(tmp_path):
    processes = [
        soak.ProcessMemory(7, soak.TRAINING, 1.0, 0.25, 2.0),
        soak.ProcessMemory(8, soak.WORKERS, 0.5, 0.0, 0.125),
    ]
    samples = [soak.Sample(5.0 * i, processes if i else processes[:1]) for i in range(9)]
    soak.write_samples(samples, tmp_path / "soak.csv")
    header, *rows = (tmp_path / "soak.csv").read_text().splitlines()
    assert header == "seconds,pid,process,anonymous_gib,shared_gib,files_gib" and len(rows) == 17
    assert rows[-1] == "40.0,8,data workers,0.5,0.0,0.125"
    page = soak.markdown({}, [], samples, metrics(tmp_path, STEADY))
    assert "| training process | files | 2.000 | 2.000 |" in page
    assert "| data workers | anonymous | 0.500 | 0.500 |" in page


@pytest.mark.slow
def test_a_run_that_ends_by_itself_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="must train until it is interrupted; it ended with exit status 1"):
        soak.soak(["seq_len=foo"], 1.0, tmp_path / "run")
