"""Runs the command lines of train.py and torchrun, but forks the ranks instead of starting new interpreters.

A new interpreter would import torch and Lightning again, which takes many seconds.

The command line is `forked_ranks.py train.py ARGUMENTS` or `forked_ranks.py torchrun ARGUMENTS`. The program must run
in a process of tests.support.processes, which has imported everything that the ranks need.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

REPOSITORY = Path(__file__).parents[2]
POPEN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen"


class ForkedRank:
    """The part of subprocess.Popen that torch.distributed.elastic uses."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: None, stderr: None, start_new_session: bool
    ) -> None:
        python, unbuffered, *command = args
        assert (python, unbuffered, start_new_session) == (sys.executable, "-u", True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(command, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a Python program in this forked process, as a new interpreter would."""
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # a new interpreter inherits ignored signals
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    sys.argv = list(command)
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    launcher, *arguments = sys.argv[1:]
    sys.path.insert(0, str(REPOSITORY))
    program = str(REPOSITORY / "train.py")
    with patch(POPEN, ForkedRank):
        if launcher == "torchrun":
            sys.argv = ["torchrun", *arguments]
            runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            runpy.run_path(program, run_name="__main__")
