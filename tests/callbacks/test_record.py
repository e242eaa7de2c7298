"""A run that ends before its last step prints the reason."""

import re

import pytest
from lightning.pytorch.callbacks import Callback

from fa_train import training
from tests.support.training import composed, tiny


class Ends(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = trainer.global_step > 0


EARLY = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, stopping_threshold: 99}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("+trainer.max_time=00:00:00:00", "step 0 of 4: the time of trainer.max_time is over"),
        (f"+callbacks.early={EARLY}", r"step 1 of 4: Stopping threshold reached: val/loss = \d+\.\d+ < 99\."),
        (f"+callbacks.ends._target_={__name__}.Ends", "step 1 of 4: a callback has set trainer.should_stop"),
    ],
    ids=["time", "early-stopping", "other"],
)
def test_a_run_says_why_it_ends_before_its_last_step(override, reason, tmp_path, capsys):
    settings = "max_steps=4", "trainer.val_check_interval=1", override
    with composed(tmp_path, *tiny(tmp_path, *settings)) as cfg:
        training.train(cfg)
    assert re.search(f"^stopped after {reason}$", capsys.readouterr().out, re.MULTILINE)
