"""Saves a checkpoint when Ctrl-C, SIGTERM, SIGUSR1 or a closed terminal ends a run.

Makes all ranks stop together after a signal, or if a callback sets trainer.should_stop.
"""

import os
import signal
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from fa_train.callbacks.checkpoint import Checkpoint
from fa_train.parallel.agreement import Agreement
from fa_train.parallel.communication import timeout_of
from fa_train.parallel.failures import end_rank, kind_of, signals_to_handle
from fa_train.private_names import private, replace_private

TERMINATED = 128 + signal.SIGTERM  # an exit status
SHOULD_STOP = 1  # a rank's answer if a callback has set trainer.should_stop; lower than all exit statuses after signals


class GracefulInterrupt(Callback):
    """Ends a run on a signal: finishes the micro-batch, lets Checkpoint save, and exits.

    The exit status is 128 plus the signal's number: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1, and 129 for
    SIGHUP, which a closed terminal sends. SLURM can send SIGUSR1 before a job's time is over. The status 138 tells the
    job script to requeue the job. Any of the ranks may receive the signal. A second signal ends the run immediately.
    If a callback sets trainer.should_stop on any rank, all ranks stop after the next micro-batch. If a callback sets it
    during a validation, all ranks stop after this validation. If a callback sets it before the first micro-batch, all
    ranks stop without training. In a run of one process, Lightning handles should_stop.
    """

    status = TERMINATED  # equal on all ranks when the run ends
    _asked_for = 0  # the exit status after a signal to this process, or 0
    # None in a run of one process, and without fit, for example if only trainer.validate is called
    _agreement: Agreement | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer, self._process = trainer, os.getpid()
        self._asked_at: float | None = None
        self._asked_for = 0
        self._agreement = Agreement(timeout_of(trainer.strategy)) if trainer.world_size > 1 else None
        # Lightning's own signal handler would hang in a broadcast. The lines below make Lightning use _on_signal.
        # Lightning ends the run when received_sigterm is set.
        self._connector = private("lightning", trainer, "_signal_connector")
        replace_private("lightning", self._connector, "_sigterm_notifier_fn", self._on_signal)
        loop = trainer.fit_loop.epoch_loop
        # without this line, Lightning would broadcast from rank 0 after every micro-batch, and wait for the device
        replace_private("lightning", loop, "_broadcast_sigterm_tensor", lambda: None)
        if self._agreement:
            # Lightning calls both methods after the hooks of all callbacks, and then reads should_stop.
            self._has_validated = False
            replace_private("lightning", loop, "_should_check_val_fx", self._after_batch)
            replace_private("lightning", loop, "_save_loggers_on_train_batch_end", self._after_validation)
            # Lightning reads should_stop after each of these methods, before the first micro-batch
            for owner, name in ((trainer.fit_loop, "setup_data"), (trainer.fit_loop, "on_run_start"), (loop, "reset")):
                replace_private("lightning", owner, name, partial(self._call_and_agree, owner, name))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for signum in signals_to_handle():  # Lightning's handler of SIGUSR1 would requeue the job
            if signum != signal.SIGTERM:  # Lightning's handler of SIGTERM calls _on_signal
                signal.signal(signum, self._on_signal)  # after fit, Lightning restores the earlier signal handlers

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # When Triton compiles its first kernel, LLVM replaces signal handlers without Python's knowledge. LLVM's
        # handler of SIGUSR1 does nothing, and its other handlers call Python's.
        is_ours = signal.getsignal(signal.SIGUSR1) == self._on_signal  # False if a user's callback has replaced it
        if is_ours:
            signal.signal(signal.SIGUSR1, self._on_signal)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._agree()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ends this rank if another rank has ended, because this rank's GPU would wait forever for the other rank.

        First waits until a checkpoint that is being written is complete, but at most 30 seconds.
        """
        if trainer.world_size > 1 and kind_of(exception) == "lost connection":
            # `end_rank` ends this process before Lightning calls the checkpoint callback
            if isinstance(trainer.checkpoint_callback, Checkpoint):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends SIGTERM to the remaining ranks
                trainer.checkpoint_callback.on_exception(trainer, pl_module, exception)
            for logger in trainer.loggers:
                logger.finalize("failed")
            end_rank(exception)

    def _call_and_agree(self, loop: Any, name: str) -> None:
        """Calls a method of one of Lightning's loops. Then lets the ranks agree before the first micro-batch."""
        getattr(type(loop), name)(loop)
        self._agree_and_wait()

    def _after_batch(self, data_fetcher: Any) -> bool:
        """Lets the ranks agree, and returns whether Lightning validates now. Runs after each micro-batch."""
        self._agree()
        loop = self._trainer.fit_loop.epoch_loop
        self._has_validated = bool(type(loop)._should_check_val_fx(loop, data_fetcher))
        return self._has_validated

    def _after_validation(self) -> None:
        """Lets the ranks agree after a validation. Lightning also calls this method if there was no validation."""
        if self._has_validated:
            self._agree_and_wait()  # waits, because no rank may start another micro-batch
        loop = self._trainer.fit_loop.epoch_loop
        type(loop)._save_loggers_on_train_batch_end(loop)

    def _agree_and_wait(self) -> None:
        """Lets the ranks agree, and waits for their answers."""
        self._agree()
        self._agree()  # waits for the answers of the first call

    def _agree(self) -> None:
        """Tells the other ranks whether this rank must stop. Stops the run if a rank said so in an earlier call."""
        if self._agreement and not self._trainer.received_sigterm:
            found = self._agreement.largest(self._asked_for or SHOULD_STOP * bool(self._trainer.should_stop))
            # False after a signal, because Lightning would validate if should_stop were True
            self._trainer.should_stop = found == SHOULD_STOP
            if found > SHOULD_STOP:
                self._stop(found)

    def _stop(self, status: int) -> None:
        self.status = status
        replace_private("lightning", self._connector, "received_sigterm", True)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # this is a forked data worker, which must ignore the signal
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._asked_for = 128 + signum
            if self._trainer.is_global_zero:  # print is not safe in a signal handler
                with suppress(OSError):  # nothing reads the output any more
                    os.write(1, b"\ninterrupted: saving after this step; a second Ctrl-C or SIGTERM stops at once\n")
            if not self._agreement:
                self._stop(self._asked_for)
        elif time.monotonic() - self._asked_at > 1:  # torchrun may repeat a Ctrl-C within a second
            os._exit(128 + signum)


def exit_status(trainer: L.Trainer) -> int:
    """Returns the exit status of a run that a signal has ended."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((x.status for x in callbacks if isinstance(x, GracefulInterrupt)), TERMINATED)


def status_after_signal(trainer: L.Trainer) -> int:
    """Returns the exit status after the signal that this process got, or 0 if it got none."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((x._asked_for for x in callbacks if isinstance(x, GracefulInterrupt)), 0)
