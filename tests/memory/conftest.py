"""Fixtures for the memory levers."""

import pytest
import torch


@pytest.fixture
def bf16_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's bf16 products end in an illegal instruction where a hypervisor promises AMX and does not have it."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
