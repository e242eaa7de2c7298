"""Runs Lightning's fit, and handles interrupts, divergence and lack of memory."""

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
    """Trains the model. Returns True if all steps ran, and False if the run was out of memory.

    SIGTERM ends the process with status 143. If training diverges, rank 0 raises DivergedError and the other ranks
    exit. In a sweep, all ranks raise it.
    """
    try:
        trainer.fit(lit_gpt, datamodule=data, ckpt_path=ckpt_path)
    except SIGTERMException:  # otherwise the exit status would be 0
        sys.exit(128 + 15)
    except DivergedError:
        trainer.strategy.barrier()  # rank 0 must close the record first: torchrun stops all ranks when one rank exits
        if trainer.is_global_zero or in_sweep:
            raise
        sys.exit(1)  # rank 0 reports the reason
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
