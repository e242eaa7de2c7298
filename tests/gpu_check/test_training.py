"""Tests tests/gpu_check/training.py on a CPU: equal runs agree, and wrong gradients are found."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.gpu_check.training import PLAIN, Trained, difference, small, train


def filled(value: float) -> Tensor:
    return torch.full((3, 2), value)


def test_configurations_are_small_and_repeatable():
    for number in range(50):
        seq_len, settings = small(number)
        assert (seq_len, settings) == small(number)
        assert seq_len <= 4096 and int(settings["model.dim"]) <= 512
        assert settings.get("model.max_seq_len", str(seq_len)) == str(seq_len)


@pytest.mark.slow
def test_a_run_with_levers_agrees_with_a_plain_run():
    levers = {"memory.checkpointing": "selective", "memory.mlp_chunk": "16", "attention": "chunked"}
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 64, "vocab_size": 50}
    settings = PLAIN | {f"model.{key}": str(value) for key, value in sizes.items()} | {"data.document_len": "20"}
    found, expected = train(64, settings | levers, "cpu"), train(64, settings, "cpu")
    text, is_wrong = difference(found, expected)
    assert not is_wrong and len(expected.gradients) > 5, text


def test_wrong_runs_are_found():
    gradients = {"a": filled(1.0), "b": filled(2.0)}
    run = Trained([2.0, 1.0], gradients)
    assert not difference(run, run)[1]
    for wrong in (
        dataclasses.replace(run, losses=[2.0, 1.1]),
        dataclasses.replace(run, losses=[2.0, float("nan")]),
        dataclasses.replace(run, gradients=gradients | {"b": filled(2.2)}),
        dataclasses.replace(run, gradients=gradients | {"b": filled(float("nan"))}),
        dataclasses.replace(run, gradients={"a": filled(1.0)}),
    ):
        assert difference(wrong, run)[1]
