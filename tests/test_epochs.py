"""Tests the setting `epochs=n`, with which a run trains on each row n times."""

import math
from types import SimpleNamespace

import lightning as L
import pytest

from fa_train import training
from fa_train.data.datamodule import PackedDataModule
from fa_train.early_checks import require_runnable
from tests.support.training import column, composed, tiny


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("epochs", [0.5, 2])
def test_steps_and_schedule_last_for_the_epochs(epochs, packing, tmp_path, capsys):
    settings = (f"epochs={epochs}", "max_steps=9999", f"data.packing={packing}", "trainer.val_check_interval=1")
    with composed(tmp_path / "run", *tiny(tmp_path, *settings)) as cfg:
        training.train(cfg)
        rows = training.build(cfg)[2].packing_report().rows
    steps = math.ceil(epochs * rows / 4)
    assert rows > 8 and steps < 9999
    lr = column(tmp_path / "run", "lr")
    assert sorted(lr) == list(range(1, steps + 1))
    assert lr[steps] == min(lr.values()), "the cosine ends at the last step"
    assert f"this run: {steps} steps of 4 rows" in capsys.readouterr().out
    assert cfg.max_steps == steps


@pytest.mark.parametrize(("warmup_steps", "warns"), [(2, False), (3, False), (6, True)])
def test_a_run_shorter_than_its_warmup_says_so(warmup_steps, warns, tmp_path, capsys):
    overrides = "max_steps=3", f"scheduler.warmup_steps={warmup_steps}", "optimizer.lr=4e-3"
    with composed(tmp_path / "run", *tiny(tmp_path, *overrides)) as cfg:
        training.train(cfg)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: the learning rate")]
    message = (
        "warning: the learning rate rises only to 0.002, and never reaches optimizer.lr=0.004: the warm-up has "
        "scheduler.warmup_steps=6 steps, but the run has only 3. Set for example scheduler.warmup_steps=1"
    )
    assert lines == [message] * warns
    assert max(column(tmp_path / "run", "lr").values()) == pytest.approx(0.002 if warns else 0.004)


def test_a_mixture_has_no_epochs():
    config = {"choices": {"strategy": "auto", "optimizer": "adamw", "data": "mix"}, "epochs": 3}
    config |= {"strategy": {}, "adapter": {}, "trainer": {}, "model": {}}
    with pytest.raises(ValueError, match=r"epochs needs one dataset; got data=mix\. Set max_steps instead"):
        require_runnable(config, 1)


def test_other_data_modules_have_no_epochs():
    with pytest.raises(ValueError, match="epochs needs a PackedDataModule; got a LightningDataModule"):
        training.fill_in_steps(SimpleNamespace(epochs=1), SimpleNamespace(), L.LightningDataModule())


def test_the_rows_of_all_epochs_are_counted_in_64_bits():
    class Data(PackedDataModule):
        def __init__(self) -> None: ...

        def steps_of(self, epochs: float) -> int:
            return 2**62

    config = SimpleNamespace(epochs=1e18, seq_len=8, batch_size=4)
    with pytest.raises(ValueError, match=rf"max_steps \* batch_size must be less than 2\*\*63; got {2**64}"):
        training.fill_in_steps(config, SimpleNamespace(), Data())
