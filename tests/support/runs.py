"""Starts tiny runs of train.py: in this process, in another process, or in another process that a signal stops."""

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa_train import training
from tests.support import processes
from tests.support.ranks import FORKED
from tests.support.training import command_line, composed, quiet_environment, tiny


def run(tmp_path: Path, *overrides: str, name: str = "run") -> tuple[dict[str, Any], Path]:
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with composed(folder, *tiny(tmp_path, *overrides)) as cfg:
        return training.train(cfg), folder


def start_and_stop(tmp_path: Path, overrides: Sequence[str], step: int, stop: int, to_all: bool = False) -> Path:
    """Starts train.py, sends a signal after it has printed `step`, and returns the folder of the new run.

    If `to_all` is true, the whole process group of the run gets the signal, and otherwise only the started process.
    All processes of the run must end within a minute.
    """
    before = set(tmp_path.rglob("metrics.csv"))
    pipe = tmp_path / "printed"
    os.mkfifo(pipe)
    arguments = ["train.py", *overrides]
    process = processes.start(FORKED, arguments, tmp_path, quiet_environment(), pipe, pipe)
    assert process.pid is not None
    hung = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    lines = []
    with pipe.open() as printed:
        for line in printed:  # the loop ends when the last process closes the pipe
            lines.append(line)
            # send the signal only once, although a validation prints a second line for the same step
            if line.startswith(f"step {step}/") and not hung.is_alive():
                hung.start()
                os.killpg(process.pid, stop) if to_all else os.kill(process.pid, stop)
    hung.cancel()
    pipe.unlink()
    process.join(60)
    assert process.exitcode == (-stop if stop == signal.SIGKILL else 128 + stop), "".join(lines)
    [metrics] = set(tmp_path.rglob("metrics.csv")) - before
    return metrics.parent


def start_and_finish(tmp_path: Path, *overrides: str) -> Path:
    before = set(tmp_path.rglob("metrics.csv"))
    done = command_line(tmp_path, *overrides)
    assert done.returncode == 0, done.stderr
    [metrics] = set(tmp_path.rglob("metrics.csv")) - before
    return metrics.parent
