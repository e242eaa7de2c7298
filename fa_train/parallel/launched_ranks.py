"""Waits for the ranks that Lightning started as children of this process."""

import atexit
import subprocess

import lightning as L
from lightning.fabric.utilities import distributed
from lightning.pytorch.strategies import launchers

from fa_train.private_names import private

_destroy_dist_connection = private("lightning", distributed, "_destroy_dist_connection")
SubprocessScriptLauncher = private("lightning", launchers, "_SubprocessScriptLauncher")


def wait_for_other_ranks(trainer: L.Trainer) -> None:
    """Makes this process wait at its exit for the ranks that it started, which may exit with a nonzero status.

    Without this function, Lightning's observer would treat a nonzero status as a failure and kill this process, perhaps
    before it has finished. This process first destroys its process group and then waits, because NCCL destroys the
    group only together with all other ranks.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, SubprocessScriptLauncher):
        ranks = launcher.procs.copy()
        launcher.procs.clear()  # the observer's list, too
        atexit.register(_end, ranks)
        atexit.unregister(_destroy_dist_connection)  # atexit first runs the function that was registered last
        atexit.register(_destroy_dist_connection)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        try:
            rank.wait(timeout=30)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
