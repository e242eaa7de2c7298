"""Tests LitGPT as a library: users' own micro-batches and losses, and the parts of Lightning other than trainer.fit."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fa_train.callbacks.monitor import Monitor
from fa_train.callbacks.progress import StepProgress
from fa_train.lit_gpt import SKIPPED, SKIPPED_IN_A_ROW, LitGPT
from fa_train.models.gpt import GPT
from fa_train.optim.adamw import adamw_8bit
from tests.memory.support.small import levers, small_gpt
from tests.support.batches import batches
from tests.support.trainers import quiet_trainer


class OwnLoss(LitGPT):
    """Overrides training_step and does not call LitGPT's."""

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.model(batch["tokens"], None, batch["position_ids"]), batch["labels"])


class OwnLossSum(LitGPT):
    """Trains on half of the usual loss."""

    def loss_sum(self, batch):
        return 0.5 * super().loss_sum(batch)


def small() -> GPT:
    return small_gpt(levers(), torch.device("cpu"), n_layers=1)


def arguments(model: GPT) -> dict[str, Any]:
    """Returns arguments of LitGPT. The optimizer's kernel scales the gradients."""
    return {
        "model": model,
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=100),
        "compile_model": False,
        "seed": 0,
    }


def trainer_in(folder: Path, **settings: Any) -> L.Trainer:
    return quiet_trainer(folder, **{"max_steps": 1, **settings})


def loader(rows: list[dict[str, Tensor]]) -> DataLoader:
    return DataLoader(cast(Any, rows), batch_size=None)


def first_tokens(row: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    shorter = {name: row[name][:number] for name in ("tokens", "labels", "position_ids")}
    return shorter | {"cu_seqlens": torch.tensor([0, number], dtype=torch.int32)}


@pytest.mark.parametrize("sizes", [(24, 6), (6, 24), (1, 24)])
def test_micro_batches_may_have_different_sizes(sizes, tmp_path):
    rows = [first_tokens(row, size) for row, size in zip(batches(2), sizes, strict=True)]
    reference = small()
    inputs = [[row[name] for name in ("tokens", "cu_seqlens", "position_ids", "labels")] for row in rows]
    (sum(reference(*values) for values in inputs) / sum(sizes)).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    lit = LitGPT(**arguments(small()))
    trainer_in(tmp_path, accumulate_grad_batches=2).fit(lit, loader(rows))
    torch.testing.assert_close(lit.step_grad_norm, norm, rtol=1e-5, atol=0)


def test_an_own_loss_overrides_loss_sum(tmp_path):
    rows = batches(1)
    with pytest.raises(ValueError, match=r"OwnLoss.training_step must call LitGPT.training_step.*override loss_sum"):
        trainer_in(tmp_path).fit(OwnLoss(**arguments(small())), loader(rows))
    own, usual = OwnLossSum(**arguments(small())), LitGPT(**arguments(small()))
    for lit in (own, usual):
        trainer_in(tmp_path).fit(lit, loader(rows))
    torch.testing.assert_close(own.step_grad_norm, usual.step_grad_norm / 2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_optimizer_that_repeats_the_loss_needs_steps_of_one_micro_batch(micro_batches, tmp_path):
    """Lightning would repeat only the last micro-batch, and add its gradients to rescaled gradients."""
    lit = LitGPT(**arguments(small()) | {"optimizer": partial(torch.optim.LBFGS, max_iter=2)})
    message = r"LBFGS computes the loss several times .* one micro-batch per device; got 2\. Increase"
    with nullcontext() if micro_batches == 1 else pytest.raises(ValueError, match=message):
        trainer_in(tmp_path, accumulate_grad_batches=micro_batches, max_steps=2).fit(lit, loader(batches(4)))


def test_the_optimizer_keeps_no_scale_after_a_step(tmp_path):
    """If the optimizer kept grad_scale, a later optimizer.step() would scale its gradients too."""
    lit, trainer = LitGPT(**arguments(small())), trainer_in(tmp_path)
    trainer.fit(lit, loader(batches(1)))
    [optimizer] = trainer.optimizers
    assert optimizer.grad_scale is None and optimizer.found_inf is None


@pytest.fixture
def trained(tmp_path) -> tuple[LitGPT, Path]:
    """Returns a trained LitGPT and its checkpoint."""
    lit, trainer = LitGPT(**arguments(small())), trainer_in(tmp_path, max_steps=3)
    trainer.fit(lit, loader(batches(3)))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    return lit, tmp_path / "trained.ckpt"


def test_a_checkpoint_is_validated_without_training(trained, tmp_path):
    lit, path = trained
    callbacks = [StepProgress(), Monitor(seq_len=24, batch_size=1, max_skipped_steps=None)]
    validating = trainer_in(tmp_path, callbacks=callbacks, enable_progress_bar=True)
    [result] = validating.validate(LitGPT(**arguments(small())), loader(batches(2)), ckpt_path=path)
    with torch.no_grad():
        expected = sum(float(lit.loss_sum(row)) for row in batches(2)) / sum(len(row["labels"]) for row in batches(2))
    assert result["val/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_is_loaded_without_a_trainer(trained, capsys):
    lit, path = trained
    model = small_gpt(levers(), torch.device("cpu"), n_layers=1, norm_eps=1e-3)
    other = {"optimizer": adamw_8bit}  # may differ from the checkpoint's optimizer, as no optimizer state is loaded
    loaded = LitGPT.load_from_checkpoint(path, **arguments(model) | other)
    for name, weight in lit.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    assert "the checkpoint was written with model.norm_eps=1e-05; this run has 0.001" in capsys.readouterr().out


class OwnSGD(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, OwnSGD, partial(torch.optim.AdamW, lr=0.5)], ids=["class", "own", "partial"]
)
def test_an_optimizer_class_gets_the_parameters_that_require_gradients(make):
    model = small()
    frozen = next(model.parameters()).requires_grad_(False)
    lit = LitGPT(**arguments(model) | {"optimizer": make})
    optimizer = cast(Any, lit.configure_optimizers())["optimizer"]
    [group] = optimizer.param_groups
    assert {*map(id, group["params"])} == {id(p) for p in model.parameters() if p is not frozen}


def test_a_scheduler_that_needs_a_metric_is_refused():
    lit = LitGPT(**arguments(small()) | {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau})
    with pytest.raises(ValueError, match="scheduler must be a schedule that needs no metric; got ReduceLROnPlateau"):
        lit.configure_optimizers()


def test_progress_may_come_before_monitor(tmp_path, capsys):
    callbacks = [StepProgress(), Monitor(seq_len=24, batch_size=1, max_skipped_steps=None)]
    settings = {"callbacks": callbacks, "enable_progress_bar": True, "max_steps": 3, "log_every_n_steps": 1}
    lit = LitGPT(**arguments(small()))
    trainer_in(tmp_path, val_check_interval=2, **settings).fit(lit, loader(batches(3)), loader(batches(1)))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [(line[0], line[1].split()[0]) for line in lines] == [
        ("step 1/3", "loss"), ("step 2/3", "loss"), ("step 2/3", "val"), ("step 3/3", "loss"),
    ]  # fmt: skip


class OwnFSDP(FSDPStrategy):
    """Lightning's Trainer refuses FSDPStrategy itself on the CPU, but not a subclass."""


@pytest.mark.parametrize("strategy", [OwnFSDP(), ModelParallelStrategy()], ids=["fsdp", "model-parallel"])
def test_strategies_of_lightning_that_shard_are_refused(strategy: Strategy, tmp_path):
    """Each rank would silently train on its own gradients, or clip them by another norm."""
    lit = LitGPT(**arguments(small()))
    lit.trainer = quiet_trainer(tmp_path, strategy=strategy, devices=2)
    lit.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ValueError, match=f"needs DDPStrategy or .*FullyShardedStrategy; got {type(strategy).__name__}"):
        lit.configure_model()


def test_monitor_refuses_other_modules(tmp_path):
    trainer = trainer_in(tmp_path, callbacks=[Monitor(seq_len=24, batch_size=1, max_skipped_steps=None)])
    with pytest.raises(ValueError, match="the module that Monitor measures must be a LitGPT; got BoringModel"):
        trainer.fit(BoringModel())


def test_lightnings_learning_rate_finder_restores_what_it_changes(trained, tmp_path):
    expected, _ = trained
    lit, trainer = LitGPT(**arguments(small())), trainer_in(tmp_path, max_steps=3)
    found = Tuner(trainer).lr_find(lit, loader(batches(8)), num_training=5, min_lr=1e-4, max_lr=1.0, update_attr=False)
    assert len(found.results["lr"]) == 5
    trainer.fit(lit, loader(batches(3)))
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, lit.state_dict()[name]), name


def test_a_checkpoint_loaded_after_on_fit_start_continues_the_counts():
    """FullyShardedStrategy loads checkpoints after on_fit_start."""
    lit = LitGPT(**arguments(small()))
    lit.on_fit_start()
    lit.on_load_checkpoint({SKIPPED: 3, SKIPPED_IN_A_ROW: 2})
    assert (int(lit.skipped_steps), int(lit._skipped_in_a_row), int(lit.longest_skip)) == (3, 2, 0)
