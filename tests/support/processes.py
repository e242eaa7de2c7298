"""Runs programs in new processes.

The processes are forked from a server process. Only the server imports the modules of train.py, because these imports
take many seconds.
"""

import multiprocessing
import multiprocessing.util
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from hydra.core.global_hydra import GlobalHydra

REPOSITORY = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")


@cache
def start_server() -> None:
    """Starts the server process that forks the programs.

    The server finds modules through PYTHONPATH, not through the sys.path of this process.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths)}):
        # the server imports the modules in the order of this list; each run with W&B needs wandb.apis.public
        forkserver.set_forkserver_preload([
            "tests.support.garbage_collection_off", "train", "fa_train.training", "wandb.apis.public",
            "tests.support.frozen",
        ])  # fmt: skip
        forkserver.ensure_running()


def start(
    program: Path | str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Path,
    errors: Path,
    limit_memory: bool = False,
) -> BaseProcess:
    """Starts `python program arguments` in a new session, or `python -m program` if `program` is the name of a module.

    `environment` does not affect modules that the server has already imported. `out` and `errors` are existing files or
    pipes. limit_memory: whether allocations beyond 200 GiB are refused, even if the system overcommits memory.
    """
    start_server()
    process = CONTEXT.Process(target=_main, args=(program, arguments, cwd, environment, out, errors, limit_memory))
    process.start()
    return process


def finish(
    program: Path | str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    limit_memory: bool = False,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program, waits for its end and returns its output.

    Raises: subprocess.TimeoutExpired after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        out.touch()
        errors.touch()
        command = [str(program), *arguments]
        process = start(program, arguments, cwd, environment, out, errors, limit_memory)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            assert process.pid is not None
            with suppress(ProcessLookupError):  # a new process may not have started its session yet
                os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), errors.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), errors.read_text())


class ForkedModule:
    """Replaces subprocess.Popen for the command `python -m module arguments`."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, **options: object
    ) -> None:
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m")
        self.done = finish(module, arguments, cwd, {**os.environ} if env is None else env)
        self.returncode = self.done.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        return self.done.stdout, self.done.stderr


def _spawn_or_fork(spawn: Callable[..., int], path: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Starts a helper process of multiprocessing, and returns its process ID.

    multiprocessing's fork server is forked from the program, so the fork server has all imported modules and starts
    quickly.

    spawn: multiprocessing's function, which starts a new interpreter. kept: file descriptors that stay open.
    """
    if "multiprocessing.forkserver" not in arguments[-1]:
        return spawn(path, arguments, kept)
    process = os.fork()
    if process == 0:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):  # listdir's own descriptor is in the list, but already closed
                    os.close(int(name))
        try:
            GlobalHydra.instance().clear()  # Hydra may be initialised in this process, unlike in a new interpreter
            exec(arguments[-1])
        finally:
            os._exit(0)  # the SystemExit that ends the fork server must not reach the program's own code
    return process


def _main(
    program: Path | str,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Path,
    errors: Path,
    limit_memory: bool,
) -> None:
    """Runs the program as `python program` would, but does not call the atexit functions at its end.

    The atexit functions of the imported modules would remove temporary folders that other processes share.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore SIGINT
    os.chdir(cwd)
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, stream.fileno())
        os.close(opened)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    if limit_memory:
        resource.setrlimit(resource.RLIMIT_AS, (200 * 2**30, 200 * 2**30))
    multiprocessing.set_start_method(None, force=True)  # resets the default
    multiprocessing.util.spawnv_passfds = partial(_spawn_or_fork, multiprocessing.util.spawnv_passfds)
    # as with `python program`, sys.path must not contain the folder in which the tests were started
    first = program.parent if isinstance(program, Path) else cwd
    sys.path[:] = [str(first), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
