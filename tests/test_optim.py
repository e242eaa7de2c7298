"""Which parameters decay, and the learning rate over a run."""

import io
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import nn

from fa_train.optim import adamw, warmup_cosine
from tests.models.test_gpt import build

CONF = Path(__file__).parents[1] / "conf"


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return adamw(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=False)


def test_norms_biases_and_position_embeddings_do_not_decay():
    model = build(positions="learned", bias=True, qk_norm=True, norm="layernorm")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimizer_of(model).param_groups
    )
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert {name for name in decayed if not name.startswith("blocks.1")} == {
        "token_embedding.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.ffn.up.weight",
        "blocks.0.ffn.down.weight",
    }
    assert [group["weight_decay"] for group in optimizer_of(model).param_groups] == [0.1, 0.0]


def test_frozen_parameters_are_left_out():
    model = build()
    model.token_embedding.weight.requires_grad_(False)
    held = {id(parameter) for group in optimizer_of(model).param_groups for parameter in group["params"]}
    assert id(model.token_embedding.weight) not in held


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        pytest.param(0, 0.1, id="first"),
        pytest.param(4, 0.5, id="warming"),
        pytest.param(9, 1.0, id="warm"),
        pytest.param(10, 1.0, id="peak"),
        pytest.param(60, 0.55, id="half-way"),
        pytest.param(110, 0.1, id="last"),
        pytest.param(200, 0.1, id="past-the-end"),
    ],
)
def test_warmup_and_cosine(step, factor):
    scheduler = warmup_cosine(optimizer_of(nn.Linear(2, 2)), warmup_steps=10, max_steps=110, min_lr_ratio=0.1)
    assert scheduler.lr_lambdas[0](step) == pytest.approx(factor)


def test_without_warmup_and_with_nothing_but_warmup():
    optimizer = optimizer_of(nn.Linear(2, 2))
    assert warmup_cosine(optimizer, warmup_steps=0, max_steps=10, min_lr_ratio=0.0).lr_lambdas[0](0) == 1.0
    factor = warmup_cosine(optimizer, warmup_steps=100, max_steps=20, min_lr_ratio=0.0).lr_lambdas[0]
    assert [factor(step) for step in (0, 19)] == [0.01, 0.2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((-1, 10, 0.1), "warmup_steps must be at least 0; got -1", id="warmup"),
        pytest.param((1, 0, 0.1), "max_steps must be at least 1; got 0", id="max-steps"),
        pytest.param((1, 10, 1.5), "min_lr_ratio must be from 0 to 1; got 1.5", id="ratio"),
    ],
)
def test_errors(arguments, message):
    warmup_steps, max_steps, min_lr_ratio = arguments
    with pytest.raises(ValueError, match=message):
        warmup_cosine(
            optimizer_of(nn.Linear(2, 2)), warmup_steps=warmup_steps, max_steps=max_steps, min_lr_ratio=min_lr_ratio
        )


def test_configs_instantiate_and_their_state_is_plain():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=["+optimizer=adamw", "+scheduler=warmup_cosine", "+max_steps=1000"])
    optimizer = instantiate(config.optimizer)(build())
    scheduler = instantiate(config.scheduler)(optimizer)
    assert scheduler.get_last_lr() == [6e-4 / 100] * 2
    saved = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, saved)
    saved.seek(0)
    torch.load(saved, weights_only=True)
