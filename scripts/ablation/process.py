"""Runs each function in a new process, so that its memory starts from zero and a crash ends only this process.

A server process imports all modules once, does not use a GPU, and forks one process for each call.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from hydra.errors import InstantiationException

from scripts.bench.command_line import REPOSITORY
from scripts.bench.page import first_line

Value = TypeVar("Value")


class ProcessError(RuntimeError):
    """Raised if an exception, a signal or the time limit ended a process before it returned a result."""

    def __init__(self, reason: str, exitcode: int | None = None) -> None:
        super().__init__(reason)
        self.exitcode = exitcode


@cache
def start_server() -> None:
    """Starts the server process.

    The server process does not get the sys.path of the process that starts it.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTORCH_NVML_BASED_CUDA_CHECK makes torch check for a GPU through NVML, without initialising CUDA. After a process
    # has initialised CUDA, processes that it forks cannot use CUDA.
    settings = {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with patch.dict(os.environ, settings):
        forkserver.set_forkserver_preload(["fa_train.training", "scripts.ablation.multirun"])
        forkserver.ensure_running()


def call_apart(function: Callable[..., Value], arguments: tuple[Any, ...], timeout: float, log: Path) -> Value:
    """Runs function(*arguments) in a new process for at most `timeout` seconds.

    The new process writes its output to `log`, and has ended when call_apart returns or raises. Raises: ProcessError if
    the process ends without a result.
    """
    start_server()
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments, str(log)))
    process.start()
    sender.close()  # makes recv raise EOFError if the new process ends without a result
    try:
        if not receiver.poll(timeout):
            raise ProcessError(f"timed out after {timeout:g} s")
        value, error = receiver.recv()
        process.join(10)
    except EOFError:
        process.join()
        raise ProcessError(f"exit status {process.exitcode}", process.exitcode) from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise ProcessError(error)
    return value


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], log: str) -> None:
    """Sends the value that the function returned, or the type and the first line of its error."""
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    value = error = None
    try:
        value = function(*arguments)
    except Exception as raised:
        traceback.print_exc()
        said: BaseException = raised
        while isinstance(said, InstantiationException) and said.__cause__:
            said = said.__cause__
        error = first_line(said)
    sender.send((value, error))


def _end_with(program: BaseProcess) -> None:
    """Kills this process as soon as the program that called call_apart has ended, for example after SIGKILL."""
    program.join()
    os.kill(os.getpid(), signal.SIGKILL)
