"""Fixtures for the tests of memory levers."""

import pytest
import torch


@pytest.fixture
def bf16_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables oneDNN. On virtual machines that announce AMX without having it, oneDNN's bf16 matmuls crash."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
