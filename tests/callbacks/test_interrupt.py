"""Tests the handler of Ctrl-C and SIGTERM by calling it directly, and the end of all ranks after should_stop."""

import ctypes
import os
import signal
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fa_train.callbacks.interrupt import GracefulInterrupt, exit_status
from fa_train.callbacks.monitor import Monitor
from fa_train.errors import errors_in_one_line
from fa_train.lit_gpt import LitGPT
from fa_train.parallel.failures import STOPPING
from tests.support.trainers import quiet_trainer


def test_ctrl_c_before_training_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, errors_in_one_line((ValueError,)):
        raise KeyboardInterrupt
    assert ended.value.code == 128 + signal.SIGINT and capsys.readouterr().err == "interrupted\n"


def started(world_size=1, strategy=None):
    """Returns the callback of a started run, and Lightning's signal connector, whose received_sigterm ends the run."""
    connector = SimpleNamespace(received_sigterm=False, _sigterm_notifier_fn=None)
    replaced = ("_broadcast_sigterm_tensor", "_should_check_val_fx", "_save_loggers_on_train_batch_end", "reset")
    loop = SimpleNamespace(**dict.fromkeys(replaced))
    trainer = SimpleNamespace(
        world_size=world_size, is_global_zero=True, _signal_connector=connector, strategy=strategy,
        fit_loop=SimpleNamespace(epoch_loop=loop, setup_data=None, on_run_start=None),
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


class Stops(Callback):
    """Sets should_stop before training, after micro-batch 3, or after the validation that follows micro-batch 4."""

    def __init__(self, hook: str) -> None:
        self.hook, self.n_validations = hook, 0

    def on_train_start(self, trainer, pl_module) -> None:
        if self.hook == "on_train_start":
            trainer.should_stop = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.hook == "on_train_batch_end" and batch_idx == 2:
            trainer.should_stop = True

    def on_validation_start(self, trainer, pl_module) -> None:
        self.n_validations += 1

    def on_validation_end(self, trainer, pl_module) -> None:
        if self.hook == "on_validation_end":
            trainer.should_stop = True


# Lightning calls setup_data, on_run_start, setup_data again, and reset. Agreement.largest runs twice after each.
BEFORE_TRAINING = 8


class TwoRanks:
    """Stands for Agreement. `of_other` maps the number of a call, from 1, to the answer of the other rank."""

    of_other: dict[int, int]

    def __init__(self, timeout: timedelta) -> None:
        self.calls = self.answer = 0

    def largest(self, answer: int) -> int:
        self.calls += 1
        found, self.answer = self.answer, max(self.answer, answer, self.of_other.get(self.calls, 0))
        return found


@pytest.mark.parametrize(
    ("hook", "of_other", "last"),
    [
        pytest.param("on_train_batch_end", {}, 4, id="own-rank"),
        pytest.param("", {BEFORE_TRAINING + 3: 1}, 4, id="other-rank"),
        pytest.param("on_validation_end", {}, 4, id="own-rank-after-validation"),
        pytest.param("", {BEFORE_TRAINING + 5: 1}, 4, id="other-rank-after-validation"),
        pytest.param("on_train_start", {}, 0, id="own-rank-before-training"),
        pytest.param("", {1: 1}, 0, id="other-rank-in-on_fit_start"),
        pytest.param("", {3: 1}, 0, id="other-rank-in-on_train_start"),
        pytest.param("", {BEFORE_TRAINING - 1: 1}, 0, id="other-rank-in-on_train_epoch_start"),
        pytest.param("", {}, 9, id="no-rank"),
    ],
)
def test_all_ranks_stop_after_the_same_micro_batch(hook, of_other, last, tmp_path, monkeypatch):
    monkeypatch.setattr("fa_train.callbacks.interrupt.Agreement", TwoRanks)
    monkeypatch.setattr(TwoRanks, "of_other", of_other, raising=False)
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    callbacks = [GracefulInterrupt(), Stops(hook)]
    settings = {"val_check_interval": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(tmp_path, max_steps=9, callbacks=callbacks, **settings)
    trainer.fit(BoringModel())
    assert trainer.global_step == last


def test_a_signal_to_another_rank_ends_the_run_without_a_validation(tmp_path, monkeypatch):
    monkeypatch.setattr("fa_train.callbacks.interrupt.Agreement", TwoRanks)
    monkeypatch.setattr(TwoRanks, "of_other", {BEFORE_TRAINING + 2: 128 + signal.SIGTERM}, raising=False)
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    counts = Stops("")
    trainer = quiet_trainer(tmp_path, max_steps=9, callbacks=[GracefulInterrupt(), counts], num_sanity_val_steps=0)
    with pytest.raises(SIGTERMException):
        trainer.fit(BoringModel())
    assert trainer.global_step == 3 and counts.n_validations == 0


@pytest.mark.parametrize("of_user", [False, True], ids=["ours", "of-a-callback"])
def test_sigusr1_ends_the_run_although_a_compiler_replaced_the_handler(of_user, tmp_path):
    """LLVM replaces the handler in C, and Python does not notice. This test calls C's `signal` to do the same."""
    handled = []

    class Sends(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 0:
                if of_user:
                    signal.signal(signal.SIGUSR1, lambda signum, frame: handled.append(signum))
                else:
                    ctypes.CDLL(None).signal(int(signal.SIGUSR1), ctypes.c_void_p(int(signal.SIG_IGN)))
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    trainer = quiet_trainer(tmp_path, max_steps=5, callbacks=[GracefulInterrupt(), Sends()], limit_val_batches=0)
    try:
        with suppress(SIGTERMException):
            trainer.fit(BoringModel())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (trainer.global_step, handled) == ((5, [signal.SIGUSR1]) if of_user else (3, []))


def test_validation_without_training(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks=[GracefulInterrupt()], limit_val_batches=1)
    trainer.validate(BoringModel(), verbose=False)


def test_a_signal_ends_a_run_that_may_not_stop_yet(monkeypatch):
    monkeypatch.setattr(TwoRanks, "of_other", {2: 128 + signal.SIGTERM}, raising=False)
    interrupt, connector = started()
    interrupt._agreement = TwoRanks(timedelta(0))
    interrupt._trainer.should_stop, interrupt._trainer.received_sigterm = True, False
    for found in (0, 1, 128 + signal.SIGTERM):
        interrupt._agree()
        assert interrupt._trainer.should_stop == (found == 1) and connector.received_sigterm == (found > 1)
    assert exit_status(SimpleNamespace(callbacks=[interrupt])) == 128 + signal.SIGTERM


def test_ranks_wait_for_each_other_as_long_as_the_strategy_says(monkeypatch):
    """NCCL does not block the host, but gloo does, so the groups of gloo need the strategy's timeout."""
    timeouts = []
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: timeouts.append(timeout))
    strategy = DDPStrategy(timeout=timedelta(minutes=30))
    started(world_size=2, strategy=strategy)
    trainer, module = SimpleNamespace(world_size=2, strategy=strategy), Mock(spec=LitGPT, device=torch.device("cpu"))
    Monitor(seq_len=8, batch_size=2, max_skipped_steps=None).on_fit_start(trainer, module)
    assert timeouts == [timedelta(minutes=30)] * 2
