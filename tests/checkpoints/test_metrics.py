"""Tests that all metrics of a checkpoint belong to the checkpoint's step."""

import json
from pathlib import Path

import pytest
import torch

from fa_train import training
from fa_train.checkpoints.metrics import metrics_of, read_result
from tests.support.training import column, composed, tiny

RESULT = {"tokens": 300, "train/loss": 2.5, "val/loss": 2.25, "val/step": 3}
STORED = {"tokens": 300, "losses": {"train/loss": 2.5}, "global_step": 3}
OWN = {"tokens": 300, "train/loss": 2.5}


@pytest.mark.parametrize(
    ("stored", "result", "expected"),
    [
        pytest.param({}, {}, OWN | {"val/loss": 2.25}, id="validation-after-the-save"),
        pytest.param({}, {"val/step": 2}, OWN, id="validation-of-an-earlier-step"),
        pytest.param({}, {"tokens": 400, "val/step": 4}, OWN, id="result-of-a-later-step"),
        pytest.param({}, {"train/loss": 2.75}, OWN, id="result-of-another-run"),
        pytest.param(
            {"losses": {"train/loss": 2.5, "val/loss": 2.125}},
            {"tokens": 400, "val/step": 4},
            OWN | {"val/loss": 2.125},
            id="stored-validation",
        ),
        pytest.param(
            {"losses": {"train/loss": float("nan")}}, {"train/loss": float("nan"), "val/step": 2}, {"tokens": 300},
            id="no-labels",
        ),
    ],
)  # fmt: skip
def test_a_metric_of_another_step_is_omitted(stored, result, expected, tmp_path):
    torch.save(STORED | {"state_dict": {}} | stored, tmp_path / "x.ckpt")
    assert metrics_of(tmp_path / "x.ckpt", RESULT | result) == expected
    without_val = {name: value for name, value in expected.items() if name != "val/loss" or "losses" in stored}
    assert metrics_of(tmp_path / "x.ckpt", {}) == without_val


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "result.json is not JSON: Expecting value", id="empty"),
        pytest.param("[1]", "result.json must hold an object; got list", id="list"),
        pytest.param('{"tokens": "x"}', "result.json must hold numbers; got 'x' for tokens", id="text"),
    ],
)
def test_a_damaged_result_is_named(content, message, tmp_path):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_result(tmp_path)


def test_an_older_checkpoint_has_no_losses(tmp_path):
    torch.save({"global_step": 3, "state_dict": {}}, tmp_path / "x.ckpt")
    assert metrics_of(tmp_path / "x.ckpt", {name: RESULT[name] for name in ("tokens", "train/loss", "val/loss")}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep_best", "max_steps", "validated"),
    [
        pytest.param(True, 5, [2, 4], id="saves-after-validations"),
        pytest.param(False, 5, [], id="saves-before-validations"),
        pytest.param(False, 4, [4], id="last-step"),
    ],
)
def test_every_checkpoint_of_a_run_has_the_losses_of_its_step(keep_best, max_steps, validated, tmp_path):
    """Compares the losses of each checkpoint with those in metrics.csv."""
    own = {
        "max_steps": max_steps, "trainer.val_check_interval": 2, "callbacks.checkpoint.every_n_train_steps": 1,
        "callbacks.checkpoint.save_top_k": -1, "callbacks.checkpoint.keep_best": keep_best,
        "export": "true",
    }  # fmt: skip
    run = tmp_path / "run"
    with composed(run, *tiny(tmp_path, *(f"{name}={value}" for name, value in own.items()))) as cfg:
        training.train(cfg)
    result, losses = json.loads((run / "result.json").read_text()), column(run, "train/loss")
    paths = {int(Path(path).stem.removeprefix("step_")): path for path in run.rglob("*.ckpt")}
    assert sorted(paths) == sorted(losses) == list(range(1, max_steps + 1))
    validations = {step: {"val/loss": loss} for step, loss in column(run, "val/loss").items() if step in validated}
    assert sorted(validations) == validated
    for step, path in paths.items():
        expected = {"tokens": step * 4 * 64, "train/loss": losses[step], **validations.get(step, {})}
        assert metrics_of(path, result) == pytest.approx(expected, rel=1e-6)
    card = (run / "exported/README.md").read_text()
    assert ("| Validation loss," in card) == (max_steps in validated)
    assert f"| Training loss, nats per token | {losses[max_steps]:.4f} |" in card
