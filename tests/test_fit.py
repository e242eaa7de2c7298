"""Tests the end of trainer.fit: after its last step, after Ctrl-C, and after an error of Lightning."""

import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from fa_train.callbacks.interrupt import GracefulInterrupt
from fa_train.fit import fit, removal_explained
from tests.memory.support.small import levers, small_gpt
from tests.support.batches import batches
from tests.support.trainers import lit_gpt, quiet_trainer


class Batches(L.LightningDataModule):
    def __init__(self, loader: type[DataLoader] = DataLoader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader(batches(2), batch_size=None)


class Ends(Callback):
    """Records the result of `holds_values` when training ends, and then raises `error` unless `error` is None."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.held = error, False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = holds_values(trainer, pl_module)
        if self.error is not None:
            raise self.error


def holds_values(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Returns False if a parameter is empty or has no optimizer state, and True otherwise."""
    states = trainer.optimizers[0].state
    return all(p.numel() > 0 and "exp_avg" in states.get(p, {}) for p in module.parameters())


@pytest.mark.parametrize("error", [None, ArithmeticError("in a callback")], ids=["finished", "failed"])
def test_lightnings_teardown_finds_nothing_to_copy(error, tmp_path, monkeypatch):
    sizes_at_teardown = []
    lit = lit_gpt(small_gpt(levers(), torch.device("cpu"), n_layers=1), torch.optim.AdamW)
    ends = Ends(error)
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[ends])
    teardown = SingleDeviceStrategy.teardown

    def recorded(strategy: SingleDeviceStrategy) -> None:
        sizes_at_teardown.append((sum(p.numel() for p in lit.parameters()), len(trainer.optimizers[0].state)))
        teardown(strategy)

    monkeypatch.setattr(SingleDeviceStrategy, "teardown", recorded)
    if error is None:
        assert fit(trainer, lit, Batches(), None)
    else:
        with pytest.raises(ArithmeticError, match="in a callback"):
            fit(trainer, lit, Batches(), None)
    assert ends.held
    assert sizes_at_teardown == [(0, 0)]  # number of parameter elements, and number of optimizer states


@pytest.mark.parametrize(
    ("error", "raised"), [(None, RuntimeError), (ArithmeticError(), ArithmeticError)], ids=["finished", "failed"]
)
def test_an_error_of_the_teardown_does_not_replace_the_error_of_the_run(error, raised, tmp_path, monkeypatch):
    """After a kernel has failed, Lightning's teardown raises an error when it frees GPU memory."""

    def teardown(strategy: SingleDeviceStrategy) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SingleDeviceStrategy, "teardown", teardown)
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[Ends(error)], limit_val_batches=0)
    with pytest.raises(raised):
        fit(trainer, BoringModel(), BoringDataModule(), None)


class Interrupted(Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        raise KeyboardInterrupt


class InterruptedLoader(DataLoader):
    def __iter__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("callbacks", "loader"), [([Interrupted()], DataLoader), ([], InterruptedLoader)], ids=["setup", "loader"]
)
def test_ctrl_c_before_training_is_no_status_1(callbacks, loader, tmp_path):
    """After Ctrl-C, Lightning would exit with status 1.

    If the data loader is still starting, Lightning's teardown raises an error instead.
    """
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=callbacks)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, BoringModel(), Batches(loader), None)
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("error", "ends"),
    [(RuntimeError("Cannot find ptxas\nmore"), SystemExit), (ValueError("disk"), ValueError)],
    ids=["compiler", "mistake"],
)
def test_ctrl_c_that_also_ends_a_compiler_gives_no_traceback(error, ends, tmp_path, capsys):
    """Triton runs ptxas as a child process, which gets Ctrl-C too. The message of the error can vary."""

    class Compiles(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 1:
                signal.raise_signal(signal.SIGINT)
                raise error

    trainer = quiet_trainer(tmp_path, max_steps=5, callbacks=[GracefulInterrupt(), Compiles()], limit_val_batches=0)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ends) as ended:
            fit(trainer, BoringModel(), BoringDataModule(), None)
    finally:
        signal.signal(signal.SIGINT, handler)
    if ends is SystemExit:
        assert ended.value.code == 128 + signal.SIGINT
        assert capsys.readouterr().err.endswith("but its last step failed: RuntimeError: Cannot find ptxas\n")


def test_a_setting_that_lightning_refuses_is_a_value_error(tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[LearningRateMonitor()])
    with pytest.raises(ValueError, match="Cannot use `LearningRateMonitor`"):
        fit(trainer, BoringModel(), Batches(), None)


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_removed_folder_of_the_run_is_named(is_removed, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    message = f"^the run's folder must exist until the run ends; {folder} was removed$" if is_removed else "metrics.csv"
    with (
        pytest.raises(ValueError if is_removed else FileNotFoundError, match=message),
        removal_explained(str(folder)),
    ):
        if is_removed:
            folder.rmdir()
        (folder / "metrics.csv").read_text()
