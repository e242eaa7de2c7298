"""A config key that copies another key must have that key's value. Unsupported settings and callbacks of Lightning are
refused.
"""

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from omegaconf import OmegaConf, open_dict

from fa_train import run_config
from fa_train.config_options import COPIED_NODES, value_of
from fa_train.copied_keys import COPIES, require_one_value
from fa_train.lit_gpt import LitGPT
from fa_train.settings import leaves
from tests.support.training import composed


class OwnModule(LitGPT):
    pass


class OwnAveraging(StochasticWeightAveraging):
    pass


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        pytest.param(
            ["data.batch_size=9"], "data.batch_size must equal batch_size, which is 8; got 9. Set batch_size instead",
            id="copied-number",
        ),
        pytest.param(
            ["trainer.strategy=ddp"], "trainer.strategy must equal strategy; got ddp. Set strategy instead",
            id="copied-node",
        ),
        pytest.param(
            ["+trainer.accumulate_grad_batches=4"],
            "trainer.accumulate_grad_batches must be 1; got 4. Set batch_size and data.micro_batch_size", id="ignored",
        ),
        pytest.param(
            ["trainer.check_val_every_n_epoch=2"],
            r"trainer.check_val_every_n_epoch must be null; got 2. Set trainer.val_check_interval", id="epochs-of-val",
        ),
        pytest.param(
            ["+trainer.limit_train_batches=0.5"],
            r"trainer.limit_train_batches must be 1.0; got 0.5. Set max_steps instead", id="cuts-epochs",
        ),
        pytest.param(
            ["+trainer.limit_train_batches=1"],
            r"trainer.limit_train_batches must be 1.0; got 1. Set max_steps instead", id="one-batch",
        ),
        pytest.param(
            ["+trainer.fast_dev_run=true"],
            "trainer.fast_dev_run must be false; got true. Set max_steps=1 instead", id="development-run",
        ),
        pytest.param(
            ["+trainer.fast_dev_run=3"],
            "trainer.fast_dev_run must be false; got 3. Set max_steps=1 instead", id="development-run-of-3-batches",
        ),
        pytest.param(
            ["trainer.use_distributed_sampler=true"],
            "trainer.use_distributed_sampler must be false; got true. The data module itself", id="sampler",
        ),
        pytest.param(
            ["~trainer.use_distributed_sampler"],
            "trainer.use_distributed_sampler must be false; got no value. The data module itself", id="no-sampler",
        ),
        pytest.param(
            ["trainer.max_epochs=1"], "trainer.max_epochs must be -1; got 1. Set epochs or max_steps", id="epochs",
        ),
        pytest.param(
            ["+trainer.min_steps=9"], "trainer.min_steps must be null; got 9. Only max_steps or epochs", id="steps",
        ),
        pytest.param(
            ["+trainer.callbacks=[]"], r"trainer.callbacks must be null; got \[\]. Add nodes to callbacks instead",
            id="callbacks",
        ),
        pytest.param(["+trainer.plugins=[]"], r"trainer.plugins must be null; got \[\]", id="plugins"),
        pytest.param(["trainer.default_root_dir=/tmp"], "trainer.default_root_dir must .*hydra.run.dir", id="folder"),
        pytest.param(["hydra.job.chdir=true"], "hydra.job.chdir must be false, .*; got true", id="other-folder"),
        pytest.param(["+trainer.barebones=true"], "trainer.barebones must be false; got true. A run", id="barebones"),
        pytest.param(
            ["+trainer.enable_progress_bar=false"],
            "trainer.enable_progress_bar=false needs callbacks.progress=null; got a callback", id="no-bar",
        ),
        pytest.param(
            ["+trainer.enable_checkpointing=false"],
            "trainer.enable_checkpointing=false needs callbacks.checkpoint=null; got a callback", id="no-checkpoints",
        ),
        pytest.param(["~trainer.precision"], "trainer.precision must be given; got nothing", id="no-precision"),
        pytest.param(["~trainer.val_check_interval"], "trainer.val_check_interval must be given", id="no-interval"),
        pytest.param(["callbacks.monitor=null"], "callbacks.monitor must be a node, .*; got none", id="no-monitor"),
        pytest.param(["~callbacks.monitor"], "callbacks.monitor must be a node, .*; got none", id="monitor-removed"),
        pytest.param(
            ["+callbacks.mine._target_=lightning.pytorch.callbacks.BatchSizeFinder"],
            "callbacks.mine must not be a BatchSizeFinder; got one. Set batch_size and data.micro_batch_size instead",
            id="batch-size-finder",
        ),
        pytest.param(
            [
                "+callbacks.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
                "+callbacks.mine.scheduling={0: 2}",
            ],
            "callbacks.mine must not be a GradientAccumulationScheduler; got one.* determine the accumulation",
            id="accumulation-scheduler",
        ),
        pytest.param(
            ["+callbacks.mine._target_=lightning.pytorch.callbacks.LearningRateFinder"],
            "callbacks.mine must not be a LearningRateFinder; got one. Set optimizer.lr instead", id="lr-finder",
        ),
        pytest.param(
            [f"+callbacks.mine._target_={__name__}.OwnAveraging", "+callbacks.mine.swa_lrs=1e-3"],
            "callbacks.mine must not be a StochasticWeightAveraging; got one. .*EMAWeightAveraging", id="averaging",
        ),
        pytest.param(
            ["+callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStopping", "+callbacks.mine.monitor=val_loss"],
            "callbacks.mine.monitor must be val/loss; got val_loss, which callbacks cannot read", id="val_loss",
        ),
        pytest.param(
            [
                "+callbacks.mine._target_=lightning.pytorch.callbacks.ModelCheckpoint",
                "+callbacks.mine.monitor=train/loss",
            ],
            "callbacks.mine.monitor must be val/loss; got train/loss, which callbacks cannot read", id="train/loss",
        ),
        pytest.param(
            ["+callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStopping", "+callbacks.mine.monitor=step"],
            "callbacks.mine.monitor must be val/loss; got step, which callbacks cannot read", id="step",
        ),
        pytest.param(
            ["+callbacks.mine=[{_target_: lightning.pytorch.callbacks.Timer}]"],
            "callbacks.mine must be a node with a _target_ or null; got ", id="list-of-callbacks",
        ),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_key_to_set(overrides, line, tmp_path):
    with (
        composed(tmp_path, "preset=cpu", "batch_size=8", *overrides) as cfg,
        pytest.raises(ValueError, match=f"^{line}"),
    ):
        run_config.check(cfg)


@pytest.mark.parametrize(
    ("kind", "monitor", "others"),
    [
        ("EarlyStopping", "val/loss", []),
        ("EarlyStopping", "mine", [f"lit_gpt._target_={__name__}.OwnModule"]),
        ("EarlyStopping", "lr-AdamW", ["+callbacks.lr._target_=lightning.pytorch.callbacks.LearningRateMonitor"]),
        ("ModelCheckpoint", "step", []),
    ],
)
def test_a_callback_can_monitor_a_metric_that_is_logged(kind, monitor, others, tmp_path):
    mine = [f"+callbacks.mine._target_=lightning.pytorch.callbacks.{kind}", f"+callbacks.mine.monitor={monitor}"]
    with composed(tmp_path, "preset=cpu", *mine, *others) as cfg:
        run_config.check(cfg)


def test_a_run_may_have_several_loggers(tmp_path):
    logger = "{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: x}"
    with composed(tmp_path, "preset=cpu", "logger=csv") as cfg, open_dict(cfg):
        cfg.logger = OmegaConf.create(f"[{logger}, {logger}]")
        run_config.check(cfg)
        cfg.logger = OmegaConf.create(f"[{logger}, 1]")
        with pytest.raises(ValueError, match=r"logger.1 must be a node with a _target_; got 1"):
            run_config.check(cfg)


def test_equal_values_pass(tmp_path):
    overrides = [
        "batch_size=8",
        "data.batch_size=8",
        "+trainer.accumulate_grad_batches=1",
        "trainer.max_epochs=null",
        "+trainer.min_epochs=null",
        "+trainer.fast_dev_run=false",
        "+trainer.limit_train_batches=1.0",
        "+trainer.overfit_batches=0",
        "+trainer.enable_progress_bar=false",
        "callbacks.progress=null",
    ]
    with composed(tmp_path, "preset=cpu", *overrides) as cfg:
        run_config.check(cfg)


def test_every_copied_key_copies_its_original_in_conf(tmp_path):
    with composed(tmp_path, "preset=cpu") as cfg:
        raw, resolved = (OmegaConf.to_container(cfg, resolve=resolve) for resolve in (False, True))
    for key, original in COPIES.items():
        assert value_of(raw, key) == f"${{{original}}}"
    require_one_value(resolved, str(tmp_path))


def test_every_node_that_copies_another_is_listed(tmp_path):
    with composed(tmp_path, "preset=cpu") as cfg:
        raw, resolved = (OmegaConf.to_container(cfg, resolve=resolve) for resolve in (False, True))
    copies = {key: value[2:-1] for key, value in leaves("", raw) if str(value).startswith("${")}
    assert {key: node for key, node in copies.items() if isinstance(value_of(resolved, key), dict)} == COPIED_NODES
