"""Fixtures for the tests of memory levers."""

import pytest
import torch


@pytest.fixture
def bf16_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables oneDNN, whose bf16 matmuls crash on virtual machines that announce AMX without having it."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
