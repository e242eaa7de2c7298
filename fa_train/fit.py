"""Runs Lightning's fit. Handles interrupts, divergence and running out of memory."""

import sys

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.errors import DivergedError


def fit(
    trainer: L.Trainer,
    lit_gpt: L.LightningModule,
    data: L.LightningDataModule,
    ckpt_path: str | None,
    *,
    in_sweep: bool,
) -> bool:
    """Trains the model. Returns True if all steps were done, and False if the run was out of memory.

    SIGTERM ends the process with status 143. If training diverges, rank 0 raises DivergedError, and all other ranks
    exit. In a sweep, all ranks raise DivergedError.
    """
    try:
        trainer.fit(lit_gpt, datamodule=data, ckpt_path=ckpt_path)
    except SIGTERMException:  # Lightning alone would exit with status 0
        sys.exit(128 + 15)
    except DivergedError:
        trainer.strategy.barrier()  # rank 0 first closes its logs, because torchrun stops all ranks if one exits
        if trainer.is_global_zero or in_sweep:
            raise
        sys.exit(1)  # rank 0 reports the error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
