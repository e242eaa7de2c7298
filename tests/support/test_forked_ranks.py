"""Tests tests.support.forked_ranks: a forked rank handles signals as a new interpreter does."""

import os
import signal
import sys

import pytest

from fa_train.parallel.failures import STOPPING
from tests.support.forked_ranks import ForkedRank

ARE_DEFAULTS = """
import signal, sys
from fa_train.parallel.failures import STOPPING
defaults = signal.SIG_DFL, signal.default_int_handler
sys.exit(not all(signal.getsignal(signum) in defaults for signum in STOPPING))
"""
IGNORES_HANGUP = "import signal, sys\nsys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("program", "of_sighup"),
    [
        pytest.param(ARE_DEFAULTS, lambda signum, frame: None, id="terminal"),
        pytest.param(IGNORES_HANGUP, signal.SIG_IGN, id="nohup"),
    ],
)
def test_a_rank_does_not_inherit_the_launchers_handlers(program, of_sighup, tmp_path):
    (tmp_path / "rank.py").write_text(program)
    handlers = {signum: signal.signal(signum, lambda signum, frame: None) for signum in STOPPING}
    try:
        signal.signal(signal.SIGHUP, of_sighup)
        command = [sys.executable, "-u", str(tmp_path / "rank.py")]
        assert ForkedRank(command, os.environ, None, None, start_new_session=True).wait(30) == 0
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
