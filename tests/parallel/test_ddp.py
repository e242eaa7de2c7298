"""Tests DDP, which strategy=auto uses if several ranks train.

Each step must average the gradients of all weights that it trains.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from fa_train.errors import TrainedWeightsError
from fa_train.parallel import ddp
from tests.checkpoints.support.callbacks import (
    FreezeAfterStepTwo,
    FreezeOnFitStart,
    UnfreezeAfterStepTwo,
    UnfreezeOnFitStart,
)
from tests.memory.support.small import levers, small_gpt
from tests.support.batches import batches
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.trainers import lit_gpt, quiet_trainer


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
    strategy = ddp.automatic(devices, num_nodes, "cpu", True)
    assert isinstance(strategy, DDPStrategy) if several else strategy == "auto"


@needs_ports
@pytest.mark.parametrize(
    ("callback", "options", "message", "steps"),
    [
        pytest.param(
            FreezeAfterStepTwo(), {},
            r"frozen after the start: model\.token_embedding\.weight\. Set .*find_unused_parameters=true", 2,
            id="frozen",
        ),
        pytest.param(FreezeAfterStepTwo(), {"find_unused_parameters": True}, None, 4, id="frozen-and-unused-are-found"),
        pytest.param(FreezeOnFitStart(), {}, "frozen after the start: model.token_embedding", 0, id="frozen-too-late"),
        pytest.param(
            UnfreezeAfterStepTwo(), {"find_unused_parameters": True},
            r"unfrozen later: model\.token_embedding\.weight\. Choose strategy=fsdp", 2, id="unfrozen",
        ),
        pytest.param(UnfreezeOnFitStart(), {}, "unfrozen later: model.token_embedding", 0, id="unfrozen-too-late"),
        pytest.param(UnfreezeAfterStepTwo(updated=False), {}, None, 4, id="unfrozen-but-not-updated"),
    ],
)  # fmt: skip
def test_a_run_ends_before_a_step_whose_gradients_are_not_averaged(
    callback, options, message, steps, tmp_path, monkeypatch
):
    for name, value in ranks_of_torchrun(1)[0].items():
        monkeypatch.setenv(name, value)
    model = small_gpt(levers(), torch.device("cpu"), n_layers=1)
    lit = lit_gpt(model, partial(torch.optim.SGD, lr=0.1))
    trainer = quiet_trainer(tmp_path, strategy=DDPStrategy(**options), max_steps=4, callbacks=[callback])
    try:
        if message is None:
            trainer.fit(lit, DataLoader(batches(4), batch_size=None))
        else:
            with pytest.raises(TrainedWeightsError, match=message):
                trainer.fit(lit, DataLoader(batches(4), batch_size=None))
    finally:
        dist.destroy_process_group()
    assert trainer.global_step == steps


def test_many_changed_weights_are_counted(monkeypatch):
    class Wrapped(torch.nn.Module):  # DDP itself needs a process group
        module, find_unused_parameters = torch.nn.Linear(2, 2), False

    monkeypatch.setattr(ddp, "DistributedDataParallel", Wrapped)
    at_start = dict.fromkeys(Wrapped.module.requires_grad_(False).parameters(), True)
    with pytest.raises(TrainedWeightsError, match="frozen after the start: weight and 1 more"):
        ddp.require_averaged(Wrapped(), at_start, [])
