"""Tests LitGPT in Lightning's training loop: accumulated gradients, their norm, and the documents of a batch."""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fa_kernels.flash_attention import schedule as schedules
from fa_train.lit_gpt import forget_scale, scale_or_skip
from fa_train.models import gpt
from fa_train.models.config import Family
from fa_train.optim.adamw import adamw
from fa_train.optim.resume import TRAINED_WEIGHTS, require_same_names, trained_weights
from tests.memory.support.small import levers, small_gpt
from tests.support.batches import TOTAL, batches
from tests.support.trainers import lit_gpt, quiet_trainer

STEPS = 3


class Watched(L.Callback):
    """Records whether gradients exist when a micro-batch begins, and the gradient norm of each step."""

    def __init__(self) -> None:
        self.began_with_gradients: list[bool] = []
        self.norms: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.began_with_gradients.append(any(p.grad is not None for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.norms.append(float(pl_module.step_grad_norm))


def by_hand(model: nn.Module, accumulated: int, clip: float) -> list[float]:
    """Trains a model without Lightning, and returns the gradient norm of each step before clipping."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    rows = batches(STEPS * accumulated)
    for step in range(STEPS):
        optimizer.zero_grad()
        for row in rows[step * accumulated : (step + 1) * accumulated]:
            loss = model(row["tokens"], row["cu_seqlens"], row["position_ids"], row["labels"])
            (loss / (TOTAL * accumulated)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return norms


def test_a_validation_without_labels_has_no_loss(monkeypatch):
    """A loss of 0 would look like the best loss."""
    lit, logged = lit_gpt(small_gpt(levers(), torch.device("cpu"), n_layers=1), None), {}
    monkeypatch.setattr(lit, "_of_all_ranks", torch.clone)
    monkeypatch.setattr(lit, "log", lambda name, value, **options: logged.update({name: float(value)}))
    lit._val_sums = torch.tensor([6.0, 3.0])
    lit.on_validation_epoch_end()
    assert logged == {"val/loss": 2.0}
    lit.on_validation_epoch_end()
    assert math.isnan(logged["val/loss"])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_are_freed_after_each_step(accumulated, tmp_path):
    device, clip = torch.device("cpu"), 0.05
    model, reference = small_gpt(levers(), device, n_layers=2), small_gpt(levers(), device, n_layers=2)
    lit = lit_gpt(model, partial(torch.optim.SGD, lr=0.1))
    watched = Watched()
    settings = {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip}
    trainer = quiet_trainer(tmp_path, max_steps=STEPS, callbacks=[watched], **settings)
    trainer.fit(lit, DataLoader(batches(STEPS * accumulated), batch_size=None))
    assert watched.began_with_gradients == [bool(n % accumulated) for n in range(STEPS * accumulated)]
    assert all(p.grad is None for p in lit.parameters())
    norms = by_hand(reference, accumulated, clip)
    assert watched.norms[accumulated - 1 :: accumulated] == pytest.approx(norms, rel=1e-5)
    for name, ours in model.state_dict().items():
        torch.testing.assert_close(ours, reference.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # on some CPUs, oneDNN has no bf16
    model = small_gpt(levers(), torch.device("cpu"), n_layers=1)
    lit = lit_gpt(model, partial(torch.optim.SGD, lr=0.1))
    watched = Watched()
    trainer = quiet_trainer(tmp_path, precision="bf16-true", max_steps=STEPS, callbacks=[watched])
    trainer.fit(lit, DataLoader(batches(STEPS), batch_size=None))
    assert any(float(torch.tensor(norm).bfloat16()) != norm for norm in watched.norms)


ADAMW = partial(adamw, lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=False)


def train_without(frozen: str, folder: Path, steps: int, ckpt_path: Path | None = None) -> L.Trainer:
    """Trains all weights of the small model except `frozen`."""
    model = small_gpt(levers(), torch.device("cpu"), n_layers=2)
    model.get_parameter(frozen).requires_grad_(False)
    trainer, data = quiet_trainer(folder, max_steps=steps), cast(Any, batches(steps))
    trainer.fit(lit_gpt(model, ADAMW), DataLoader(data, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def test_a_run_that_trains_other_weights_of_equal_shapes_does_not_resume(tmp_path):
    """The moments of a weight would become those of another weight."""
    first, second = (f"blocks.0.attention.{norm}_norm.weight" for norm in "qk")
    saved, earlier = tmp_path / "saved.ckpt", tmp_path / "earlier.ckpt"
    train_without(first, tmp_path, 1).save_checkpoint(saved)
    assert train_without(first, tmp_path, 2, saved).global_step == 2
    with pytest.raises(
        ValueError, match=rf"only by this run: model\.{first}; .* only by the checkpoint's run: model\.{second}\."
    ):
        train_without(second, tmp_path, 2, saved)
    content = torch.load(saved, weights_only=True)
    del content[TRAINED_WEIGHTS]  # as in a checkpoint of an earlier version
    torch.save(content, earlier)
    assert train_without(second, tmp_path, 2, earlier).global_step == 2


@pytest.mark.parametrize(
    ("own", "saved", "message"),
    [
        pytest.param("abc", "abc", None, id="equal"),
        pytest.param("abc", "", None, id="no-names"),
        pytest.param("abcde", "af", "by this run: b, c, d and 1 more; .* run: f", id="others"),
        pytest.param("ab", "abc", "by this run: none; .* run: c", id="fewer"),
        pytest.param("abc", "acb", "in the same order: b; got c", id="another-order"),
    ],
)
def test_weights_are_compared_by_name(own, saved, message):
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        require_same_names([[*own]], [[*saved]] if saved else [])


def test_weights_are_named_in_the_order_of_the_optimizer():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight  # tied
    module[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [module[0].bias]}, {"params": [nn.Parameter(torch.ones(1))]}])
    optimizer.add_param_group({"params": [module[1].weight]})
    assert trained_weights(module, [optimizer]) == [["0.bias", "", "0.weight"]]


def test_a_skipped_first_step_leaves_fused_sgd_without_a_momentum(monkeypatch):
    """Torch's kernel would leave the momentum uninitialized, so the memory that torch allocates is set to 1e30."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, 1e30))
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5, fused=True)
    for gradient, skipped in ((math.nan, True), (1.0, False), (1.0, False)):
        weight.grad = torch.full_like(weight, gradient)
        scale_or_skip(optimizer, [weight.grad], torch.tensor(0.5), torch.tensor(skipped))
        optimizer.step()
        forget_scale(optimizer)
    assert weight.tolist() == [1 - 0.5 * (0.5 + 0.75)] * 2


@pytest.mark.parametrize(("ends", "one"), [((0, TOTAL), True), ((0, 9, TOTAL), False), ((0, TOTAL, TOTAL), False)])
def test_a_batch_of_one_document_is_known_to_be_one(ends, one, monkeypatch):
    """The host sees from the shape of cu_seqlens that a batch has one document, and does not wait for the GPU."""
    seen = []
    monkeypatch.setattr(gpt, "windowed_schedule", lambda *x, f=gpt.windowed_schedule: seen.append(f(*x)) or seen[-1])
    model = small_gpt(levers(), torch.device("cpu"), n_layers=1)
    lit = lit_gpt(model, torch.optim.SGD)
    [batch] = batches(1)
    loss = lit.loss_sum(batch)
    lit.loss_sum(batch | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)})
    assert [schedule.is_one_causal_document for schedule in seen] == [True, one]
    torch.testing.assert_close(
        loss, model(*(batch[name] for name in ("tokens", "cu_seqlens", "position_ids", "labels")))
    )


@pytest.mark.parametrize(
    ("known", "length_classes"),
    [({"mean_seqlen": 16}, ["medium", "long"]), ({}, ["short", "short"])],
    ids=["known", "not"],
)
def test_the_length_of_documents_chooses_the_kernels(known, length_classes, monkeypatch):
    """The first layer's window has 10 tokens, so its kernels are chosen as if the documents had at most 10 tokens.

    Without mean_seqlen, the mean length of the documents is estimated from cu_seqlens, and padding makes the estimate
    too small.
    """
    monkeypatch.setattr(schedules, "SHORT_DOCUMENT", 8)
    monkeypatch.setattr(schedules, "LONG_DOCUMENT", 12)
    seen = []
    monkeypatch.setattr(gpt, "windowed_schedule", lambda *x, f=gpt.windowed_schedule: seen.append(f(*x)) or seen[-1])
    model = small_gpt(levers(), torch.device("cpu"), n_layers=2, family=Family(windows=[10, None]))
    lit = lit_gpt(model, torch.optim.SGD)
    [batch] = batches(1)
    lit.loss_sum(batch | {"cu_seqlens": torch.tensor([0, 16, TOTAL, TOTAL], dtype=torch.int32)} | known)
    assert [schedule.length_class for schedule in seen] == length_classes
