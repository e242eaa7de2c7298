"""strategy=auto is DDP if several ranks train."""

import pytest
from lightning.pytorch.strategies import DDPStrategy

from fa_train.parallel.ddp import automatic


@pytest.mark.parametrize(
    ("devices", "num_nodes", "environment", "several"),
    [
        (1, 1, {}, False),
        ([0], 1, {}, False),
        (2, 1, {}, True),
        ([0, 2], 1, {}, True),
        (1, 2, {}, True),
        ("auto", 1, {}, False),
        (2, 1, {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}, True),
        (1, 1, {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1"}, False),
    ],
)
def test_several_devices_use_ddp(devices, num_nodes, environment, several, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy = automatic(devices, num_nodes, "cpu", True)
    assert isinstance(strategy, DDPStrategy) if several else strategy == "auto"
