"""Ctrl-C and SIGTERM: a run saves before it ends."""

import os
import signal
import time
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from fa_train.parallel.agreement import Agreement
from fa_train.parallel.launched_ranks import SubprocessScriptLauncher
from fa_train.private_names import private, replace_private


class GracefulInterrupt(Callback):
    """Ctrl-C and SIGTERM end a run, of any number of ranks: a micro-batch is finished, Checkpoint saves, exit 143.

    A second one ends it at once. Any rank may get the signal, and any number of them.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer, self._process = trainer, os.getpid()
        self._asked_at: float | None = None
        self._agreement = Agreement() if trainer.world_size > 1 else None
        # Lightning's own handler broadcasts, in the midst of whatever collective the signal came into, and hangs. It
        # registers this one in place of that when this hook has run, and stops where received_sigterm is set.
        self._connector = private("lightning", trainer, "_signal_connector")
        replace_private("lightning", self._connector, "_sigterm_notifier_fn", self._on_signal)
        # what all ranks agree on here, it would broadcast from rank 0 every micro-batch, and wait for the device
        replace_private("lightning", trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.signal(signal.SIGINT, self._on_signal)  # Lightning puts back the handlers that were there before fit

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._agree()

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

    def _agree(self) -> None:
        if self._agreement and not self._trainer.received_sigterm and self._agreement.any(self._asked_at is not None):
            replace_private("lightning", self._connector, "received_sigterm", True)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data worker, forked with this handler: the terminal's Ctrl-C is not for it
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            if self._trainer.is_global_zero:  # print() must not be interrupted by another one
                os.write(1, b"\ninterrupted: saving after this step; once more (Ctrl-C or SIGTERM) stops at once\n")
            if not self._agreement:
                replace_private("lightning", self._connector, "received_sigterm", True)
        elif time.monotonic() - self._asked_at > 1:  # torchrun and others pass on what the terminal has sent already
            launcher = self._trainer.strategy.launcher
            if isinstance(launcher, SubprocessScriptLauncher):
                launcher.kill(signal.SIGKILL)
            os._exit(128 + signum)
