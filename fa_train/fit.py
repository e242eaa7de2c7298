"""Runs Lightning's fit, and says how it ended."""

import sys

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fa_train.callbacks.monitor import DivergedError
from fa_train.callbacks.out_of_memory import is_out_of_memory


def fit(
    trainer: L.Trainer,
    lit_gpt: L.LightningModule,
    data: L.LightningDataModule,
    ckpt_path: str | None,
    *,
    in_sweep: bool,
) -> bool:
    """Trains, and returns whether all steps ran; False if memory ran out, which the callbacks then report.

    SIGTERM ends the process with status 143. If training diverges, rank 0 raises DivergedError and the other ranks
    exit; in a sweep all raise.
    """
    try:
        trainer.fit(lit_gpt, datamodule=data, ckpt_path=ckpt_path)
    except SIGTERMException:  # a SystemExit with status 0
        sys.exit(128 + 15)
    except DivergedError:
        trainer.strategy.barrier()  # torchrun stops all ranks when one exits, and rank 0 must close the record first
        if trainer.is_global_zero or in_sweep:
            raise
        sys.exit(1)  # rank 0 says why
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
