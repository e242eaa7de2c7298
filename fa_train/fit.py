"""Trains with Lightning's fit. Handles signals, divergence and out-of-memory errors."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from fa_train.callbacks.interrupt import exit_status, status_after_signal
from fa_train.callbacks.out_of_memory import is_out_of_memory, out_of_memory_advice
from fa_train.errors import SHOW_TRACEBACK, DivergedError, OutOfMemoryError
from fa_train.parallel.fsdp import FullyShardedStrategy


def fit(
    trainer: L.Trainer,
    lit_gpt: L.LightningModule,
    data: L.LightningDataModule,
    ckpt_path: str | None,
) -> bool:
    """Trains the model. Returns False if memory ran out in a run of one rank, and otherwise True.

    A run without fsdp frees the weights and the optimizer states at its end, so the model cannot be used afterwards.

    A signal ends the process with exit status 128 plus the signal's number. In a run of one process, an error between
    the signal and the end of the run does not change this status, unless `fit` raises one of the errors below, or
    HYDRA_FULL_ERROR=1 is set. If training diverges, all ranks raise DivergedError.
    Raises: KeyboardInterrupt if Ctrl-C comes before training starts. ValueError if Lightning refuses a setting, for
    example a callback that needs a logger. ValueError if the run's folder was removed during the run. OutOfMemoryError
    if this rank ran out of memory in a run of several ranks. OutOfMemoryError ends the other ranks, which would
    otherwise wait for this rank.
    """
    if not isinstance(trainer.strategy, FullyShardedStrategy):
        empty_before_teardown(trainer, lit_gpt)
    try:
        with removal_explained(trainer.default_root_dir):
            trainer.fit(lit_gpt, datamodule=data, ckpt_path=ckpt_path)
    except SIGTERMException:  # after a signal, Lightning alone would exit with status 0
        # the launcher ends all ranks as soon as one exits, so every rank first waits until rank 0 has closed its logs
        trainer.strategy.barrier()
        sys.exit(exit_status(trainer))
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # after Ctrl-C, Lightning exits with status 1
            raise end.__context__ from None
        raise
    except DivergedError:
        trainer.strategy.barrier()
        raise
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # from Ctrl-C; Lightning's teardown then failed
            raise error.__context__ from None
        status = status_after_signal(trainer) if trainer.world_size == 1 else 0
        if status and not SHOW_TRACEBACK and not isinstance(error, ValueError):
            # Ctrl-C also ends compilers such as ptxas, because a terminal sends it to all processes of the run.
            reported = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            print(f"error: a signal asked the run to stop, but its last step failed: {reported}", file=sys.stderr)
            sys.exit(status)
        if not is_out_of_memory(error):
            raise
        if trainer.world_size > 1:
            raise OutOfMemoryError(out_of_memory_advice(trainer)) from error
        return False
    return True


@contextmanager
def removal_explained(folder: str) -> Iterator[None]:
    """Raises: ValueError in place of a FileNotFoundError if the run's folder was removed during the run."""
    if not os.path.isdir(folder):  # a folder on another machine
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
    except FileNotFoundError as error:
        if os.fstat(descriptor).st_nlink:  # the folder exists, although perhaps under another name
            raise
        raise ValueError(f"the run's folder must exist until the run ends; {folder} was removed") from error
    finally:
        os.close(descriptor)


def empty_before_teardown(trainer: L.Trainer, lit_gpt: L.LightningModule) -> None:
    """Frees weights and optimizer states at the end of the run, because Lightning would copy them to host memory.

    When Lightning tears down a strategy other than fsdp, it copies weights and optimizer states to host memory, even
    after an error or a signal. Copying takes seconds, and needs as much host memory as the weights and optimizer states
    need GPU memory. No checkpoint is saved after the teardown begins. If an error has ended the run, an error of the
    teardown does not replace it.
    """
    teardown = trainer.strategy.teardown

    def empty_first() -> None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for parameter in lit_gpt.parameters():
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)
        has_failed = sys.exc_info()[0] is not None
        try:
            teardown()
        except RuntimeError:  # a GPU on which a kernel has failed raises an error at every use
            if not has_failed:
                raise

    setattr(trainer.strategy, "teardown", empty_first)  # noqa: B010  mypy allows no assignment to a method
