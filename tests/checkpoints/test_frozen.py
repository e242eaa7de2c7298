"""Tests the checkpoints of models with frozen weights.

A checkpoint leaves out frozen weights only if they are the pretrained base model of an adapter.
"""

from pathlib import Path

import pytest
import torch

from fa_train.checkpoints.base import REFERENCE, drop_base, require_fit, restore_base
from fa_train.checkpoints.files import CheckpointError, shapes
from fa_train.models.gpt import GPT
from fa_train.models.hf.export import load
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.models.lora import adapter_tensors
from tests.checkpoints.support.callbacks import freeze_embedding
from tests.memory.support.small import levers, small_gpt
from tests.models.support.adapters import lora
from tests.support.runs import run
from tests.support.trainers import lit_gpt
from tests.support.training import column

EMBEDDING = "token_embedding.weight"
FROZEN = "adapter._target_=tests.checkpoints.support.callbacks.freeze_embedding"
SIX_STEPS = ("model=llama_1b", "max_steps=6", "callbacks.checkpoint.every_n_train_steps=3")


def small() -> GPT:
    return small_gpt(levers(), torch.get_default_device())


@pytest.fixture
def pretrained(tmp_path) -> Path:
    save_pretrained(small(), tmp_path / "base", None)
    return tmp_path / "base"


def saved(model: GPT) -> dict:
    """Returns the parts of LitGPT's checkpoint that drop_base and restore_base use."""
    checkpoint = {"state_dict": {f"model.{name}": weight.clone() for name, weight in model.state_dict().items()}}
    drop_base(model, checkpoint)
    return checkpoint


def names(checkpoint: dict) -> set[str]:
    return {name.removeprefix("model.") for name in checkpoint["state_dict"]}


@pytest.mark.slow
def test_a_run_with_a_frozen_embedding_resumes_and_exports(tmp_path):
    _, whole = run(tmp_path, *SIX_STEPS, FROZEN, "export=true", name="whole")
    resume = f"ckpt_path={whole}/checkpoints/step_0000003.ckpt"
    _, rest = run(tmp_path, *SIX_STEPS, FROZEN, resume, name="rest")
    losses = column(whole, "train/loss")
    assert column(rest, "train/loss") == {step: losses[step] for step in (4, 5, 6)}
    content = torch.load(whole / "checkpoints/step_0000006.ckpt", weights_only=True)
    exported = load_pretrained(whole / "exported", "naive")
    assert REFERENCE not in content and torch.equal(
        exported.token_embedding.weight, content["state_dict"][f"model.{EMBEDDING}"]
    )


@pytest.mark.slow
def test_weights_that_are_frozen_after_some_steps_keep_their_trained_values(tmp_path):
    frozen = "+callbacks.freeze._target_=tests.checkpoints.support.callbacks.FreezeAfterStepTwo"
    _, whole = run(tmp_path, *SIX_STEPS, frozen, name="whole")
    three, six = (
        torch.load(whole / f"checkpoints/step_000000{step}.ckpt", weights_only=True)["state_dict"] for step in (3, 6)
    )
    assert three.keys() == six.keys() and torch.equal(three[f"model.{EMBEDDING}"], six[f"model.{EMBEDDING}"])
    assert not torch.equal(three["model.norm.weight"], six["model.norm.weight"])


def test_without_an_adapter_frozen_weights_are_kept():
    model = freeze_embedding(small())
    checkpoint = saved(model)
    assert REFERENCE not in checkpoint and names(checkpoint) == set(model.state_dict())


def test_a_random_base_is_stored_with_its_adapter():
    model = lora()(small())
    checkpoint = saved(model)
    assert REFERENCE not in checkpoint and names(checkpoint) == set(model.state_dict())


def test_the_base_of_an_adapter_is_no_random_model(pretrained):
    checkpoint = saved(lora()(load_pretrained(pretrained, "naive")))
    with pytest.raises(CheckpointError, match=rf"trained on: {pretrained} with SHA-256 \w+…; got random weights$"):
        restore_base(lora()(small()), checkpoint)


def test_with_an_adapter_only_the_weights_that_lora_froze_are_left_out(pretrained):
    model = lora()(freeze_embedding(load_pretrained(pretrained, "naive")))
    a = next(iter(adapter_tensors(model).values()))
    a.requires_grad_(False)
    model.norm.weight.requires_grad_(True)
    checkpoint = saved(model)
    adapters = {name for name in model.state_dict() if "lora_" in name}
    stored = adapters | {"norm.weight"}
    assert names(checkpoint) == stored and REFERENCE in checkpoint
    with torch.no_grad():
        a.zero_()
    restore_base(model, checkpoint)
    model.load_state_dict({name.removeprefix("model."): x for name, x in checkpoint["state_dict"].items()})
    assert a.any(), "the frozen adapter matrix is loaded"
    checkpoint = saved(model)
    assert names(checkpoint) == stored, "the resumed run leaves out the same weights"
    model.norm.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"the model has no model\.norm\.weight"):
        restore_base(model, checkpoint)


def test_checkpoints_of_earlier_versions_without_frozen_weights_fit(pretrained):
    model = freeze_embedding(load_pretrained(pretrained, "naive"))
    earlier = saved(lora()(load_pretrained(pretrained, "naive")))[REFERENCE]
    checkpoint = saved(model) | {REFERENCE: earlier}
    del checkpoint["state_dict"][f"model.{EMBEDDING}"]
    require_fit(model, shapes(checkpoint["state_dict"]), checkpoint, "the checkpoint")
    restore_base(model, checkpoint)
    assert torch.equal(checkpoint["state_dict"][f"model.{EMBEDDING}"], model.token_embedding.weight)
    frozen = lora()(load_pretrained(pretrained, "naive"))
    adapter = adapter_tensors(frozen)
    next(iter(adapter.values())).requires_grad_(False)
    checkpoint = saved(frozen)
    kept = {f"model.{name}" for name, p in frozen.named_parameters() if p.requires_grad}
    checkpoint["state_dict"] = {name: x for name, x in checkpoint["state_dict"].items() if name in kept}
    assert len(kept) == len(adapter) - 1
    require_fit(frozen, shapes(checkpoint["state_dict"]), checkpoint, "the checkpoint")


def test_another_base_that_is_loaded_after_lora_is_stored(pretrained, tmp_path):
    def base() -> GPT:
        return load_pretrained(pretrained, "naive")

    model, own = lora()(base()), base()
    model.load_state_dict(own.state_dict(), strict=False)
    assert REFERENCE in saved(model), "the same base model is left out"
    with torch.no_grad():
        own.norm.weight.add_(1)
    model.load_state_dict(own.state_dict(), strict=False)
    checkpoint = saved(model) | {"global_step": 3}
    assert REFERENCE not in checkpoint and names(checkpoint) == set(model.state_dict())
    path = tmp_path / "x.ckpt"
    torch.save(checkpoint, path)
    again, step = load(path, lambda vocab_size: lora()(base()))
    tokens = torch.arange(9)
    assert step == 3 and torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("has_reference", [False, True])
def test_a_resumed_run_stores_the_base_model_if_its_checkpoint_does(has_reference, pretrained):
    """FullyShardedStrategy loads the weights itself, and passes a checkpoint without weights to LitGPT."""
    model = lora()(load_pretrained(pretrained, "naive"))
    lit = lit_gpt(model, torch.optim.SGD)
    assert model.base_weights
    lit.on_load_checkpoint({REFERENCE: {}} if has_reference else {})
    assert bool(model.base_weights) == has_reference == (REFERENCE in saved(model))
