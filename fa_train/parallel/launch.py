"""Starts the ranks of a run on one machine, forwards signals to them, and reports why a run fails.

A rank runs in the same way under torchrun and under this launcher, because both start processes with
torch.distributed.elastic. After a signal, torchrun's agent would kill a rank that needs over 30 seconds to save a
checkpoint. This launcher forwards signals itself, and then waits for the ranks without a time limit. The store is in
the launcher's process, so it outlives every rank.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fa_train.errors import SHOW_TRACEBACK, RankFailedError
from fa_train.parallel.failures import STOPPED, Kind, reason, signals_to_handle
from fa_train.parallel.ranks import DECISIONS

REPEATED = 1.0  # a signal that follows the first within this many seconds counts as a duplicate of the first


class _StoppedError(BaseException):
    """Raised by a second signal, which must end the run at once."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def launch(n_ranks: int, arguments: Sequence[str], decisions: Mapping[str, Any]) -> None:
    """Runs this program with `arguments` in n_ranks processes and waits until all of them end.

    decisions: the launcher's decisions, which all ranks receive (fa_train.parallel.decisions).
    If one rank fails, the others get SIGTERM and, after 30 seconds, SIGKILL. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are
    forwarded to all ranks, and the launcher then waits without a time limit. A second signal kills the ranks. After a
    signal, the program ends with the exit status of the ranks.
    Raises: RankFailedError if a rank fails.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # this file reports failures
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torch's handlers would replace those of _Forwarding
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        DECISIONS: json.dumps(decisions), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "train.py", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # this is the user's value of HYDRA_FULL_ERROR, which train.py has set to 1 in this process
        "HYDRA_FULL_ERROR": str(int(SHOW_TRACEBACK)),
    }  # fmt: skip
    environments = {rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)}
    commands = dict.fromkeys(environments, ("-u", sys.argv[0], *arguments))
    with tempfile.TemporaryDirectory(prefix="fa_train_") as folder:  # for the error files
        logs = DefaultLogsSpecs(log_dir=folder)
        forwarding = _Forwarding()
        try:
            ranks = start_processes("rank", sys.executable, commands, environments, logs)
            try:
                forwarding.begin(ranks)
                result = ranks.wait(period=0.1)
            except _StoppedError as stopped:
                sys.exit(128 + stopped.signum)
            finally:
                ranks.close(signal.SIGKILL)
        finally:
            forwarding.end()
        assert result is not None  # wait has no timeout
        if result.is_failed():
            _fail([*result.failures.values(), *_exits(ranks, result.failures)], forwarding.signum)


class _Forwarding:
    """Forwards signals to all ranks. `signum` is the number of the first signal, or 0 before any signal.

    Before `begin`, signals are kept, and `begin` forwards the first one. After `begin`, a second signal raises
    _StoppedError if it comes more than `REPEATED` seconds after the first signal.
    """

    def __init__(self) -> None:
        self._ranks: PContext | None = None
        self.signum, self._first = 0, 0.0
        self._handled = signals_to_handle()
        for forwarded in self._handled:
            signal.signal(forwarded, self._forward)

    def begin(self, ranks: PContext) -> None:
        """Starts to forward signals to `ranks`."""
        self._ranks = ranks
        if self.signum:
            self._send(self.signum)

    def end(self) -> None:
        for forwarded in self._handled:
            signal.signal(forwarded, signal.default_int_handler if forwarded == signal.SIGINT else signal.SIG_DFL)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if self._ranks is not None and self.signum and time.monotonic() - self._first > REPEATED:
            raise _StoppedError(signum)
        if not self.signum:
            self.signum, self._first = signum, time.monotonic()
        self._send(signum)

    def _send(self, signum: int) -> None:
        for pid in self._ranks.pids().values() if self._ranks is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def _fail(failures: Sequence[ProcessFailure], signum: int) -> None:
    """Ends the program after a signal, or raises a RankFailedError that says why a rank has failed.

    failures: the failed ranks, in the order in which the launcher saw them fail. signum: the signal that the launcher
    forwarded, or 0.
    """
    failure = root(failures)
    if failure.exitcode in STOPPED:  # a rank may have got a signal that this process did not get
        sys.exit(failure.exitcode)
    if signum:
        sys.exit(128 + signum)
    kind, message = _kind(failure), failure.error_file_data["message"]
    if kind is not None:
        reported = reason(failure.local_rank, kind, message)
        raise RankFailedError(reported, out_of_memory=kind == "out of memory")
    raise RankFailedError(f"rank {failure.local_rank} {_end(failure.exitcode)}")


def _exits(ranks: PContext, failed: Mapping[int, ProcessFailure]) -> list[ProcessFailure]:
    """Returns the reports of ranks that called sys.exit(0). Other ranks can fail because of such an exit.

    failed: the failures that the launcher saw, {rank: failure}. The result does not contain the ranks in `failed`.
    A rank that trained until the end has no error file.
    """
    files = {rank: file for rank, file in ranks.error_files.items() if rank not in failed and os.path.isfile(file)}
    return [ProcessFailure(rank, ranks.pids()[rank], 0, file) for rank, file in files.items()]


def root(failures: Sequence[ProcessFailure]) -> ProcessFailure:
    """Returns the failure that caused all other failures.

    A lost connection counts as the consequence of another failure.
    """
    return min(failures, key=lambda failure: _kind(failure) == "lost connection")


def _kind(failure: ProcessFailure) -> Kind | None:
    """Returns the kind of failure that the rank reported (fa_train.parallel.failures), or None if it sent no report."""
    return failure.error_file_data.get("kind")


def _end(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    cause = "; the machine may have run out of memory" if exitcode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exitcode).name}{cause}"
