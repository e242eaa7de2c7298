"""Tests the handler of Ctrl-C and SIGTERM by calling it directly."""

import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from fa_train.callbacks.interrupt import GracefulInterrupt, exit_status
from fa_train.errors import errors_in_one_line
from fa_train.parallel.failures import STOPPING


def test_ctrl_c_before_training_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, errors_in_one_line((ValueError,)):
        raise KeyboardInterrupt
    assert ended.value.code == 128 + signal.SIGINT and capsys.readouterr().err == "interrupted\n"


def started():
    """Returns the callback of a started run, and Lightning's signal connector, whose received_sigterm ends the run."""
    connector = SimpleNamespace(received_sigterm=False, _sigterm_notifier_fn=None)
    trainer = SimpleNamespace(
        world_size=1, is_global_zero=True, _signal_connector=connector, strategy=SimpleNamespace(launcher=None),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_broadcast_sigterm_tensor=None)),
    )  # fmt: skip
    interrupt = GracefulInterrupt()
    interrupt.on_fit_start(trainer, None)
    return interrupt, connector


def test_a_signal_ends_the_run_gracefully_although_the_reader_of_its_output_has_ended(monkeypatch):
    _, connector = started()
    monkeypatch.setattr("fa_train.callbacks.interrupt.os.write", Mock(side_effect=BrokenPipeError))
    connector._sigterm_notifier_fn(signal.SIGINT, None)
    assert connector.received_sigterm


def ignore(signum, frame):
    """A handler that is not SIG_IGN. SIG_DFL would end the tests if the callback did not replace it."""


@pytest.mark.parametrize("before", [ignore, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_a_closed_terminal_ends_the_run_gracefully_unless_the_signal_is_ignored(before):
    handlers = {x: signal.getsignal(x) for x in STOPPING}
    try:
        signal.signal(signal.SIGHUP, before)
        interrupt, connector = started()
        interrupt.on_train_start(None, None)
        signal.raise_signal(signal.SIGHUP)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert connector.received_sigterm == (before != signal.SIG_IGN)


def test_the_second_signal_stops_at_once(monkeypatch, capfd):
    """A second signal within one second of the first one is ignored, because torchrun repeats each signal once."""
    now, exits = [100.0], []
    monkeypatch.setattr("fa_train.callbacks.interrupt.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("fa_train.callbacks.interrupt.os._exit", exits.append)
    interrupt, connector = started()
    with monkeypatch.context() as in_worker:
        in_worker.setattr("fa_train.callbacks.interrupt.os.getpid", lambda: -1)
        connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert not connector.received_sigterm and not capfd.readouterr().out
    for seconds in (0, 0.5):
        now[0] = 100 + seconds
        connector._sigterm_notifier_fn(signal.SIGINT, None)
        assert connector.received_sigterm and not exits
    assert exit_status(SimpleNamespace(callbacks=[interrupt])) == 128 + signal.SIGINT
    assert capfd.readouterr().out.count("interrupted: saving after this step") == 1
    now[0] = 102
    connector._sigterm_notifier_fn(signal.SIGINT, None)
    assert exits == [128 + signal.SIGINT]
