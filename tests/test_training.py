"""Tests what fa_train.training builds, and the values that it passes to the memory planner."""

import gc
import re
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from fa_train import preflight, training
from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.memory.host_memory import HostPool
from fa_train.memory.planner.plan import Plan
from fa_train.parallel.fsdp import FullyShardedStrategy
from tests.support.training import composed, tiny


def test_a_run_on_one_device_logs_although_the_cluster_has_set_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # Lightning sets this attribute when RANK is 1
    with composed(tmp_path, *tiny(tmp_path)) as cfg:
        trainer, _, _ = training.build(cfg)
    trainer.logger.log_metrics({"loss": 1.0}, step=1)
    trainer.logger.save()
    assert (tmp_path / "metrics.csv").exists()


def test_a_users_own_strategy_may_set_what_its_config_lacks(tmp_path, monkeypatch):
    plans: list[Plan] = []
    monkeypatch.setattr(FullyShardedStrategy, "root_device", torch.device("cpu"))
    monkeypatch.setattr(training, "plan_memory", lambda plan, *_, **__: plans.append(plan) or plan)
    strategy = FullyShardedStrategy(1, False, True, "float32", context=2, head_groups=2)
    trainer: Any = SimpleNamespace(strategy=strategy, num_devices=2, world_size=2, precision="32-true", print=str)
    fsdp = tiny(tmp_path, "strategy=fsdp", "strategy.replicas=1", "trainer.devices=2", "attention=flash")
    with composed(tmp_path, *fsdp, "~strategy.reduce_once", "~strategy.context", "~strategy.head_groups") as cfg:
        training.fill_in_levers(cfg, trainer, vocab_size=257)
    run = plans[0].run
    assert (run.ranks, run.context, run.head_groups) == (2, 2, 2)
    assert run.reduce_once and not run.reshard_after_forward and run.accumulates


def test_a_job_of_a_sweep_is_planned_after_the_memory_of_the_last_job_is_freed(tmp_path, monkeypatch):
    """A trainer and its module refer to each other, so that reference counts alone do not free their memory."""
    pool: Any = HostPool(pinned=False)
    pool.itself, of_last_job = pool, weakref.ref(pool)
    del pool

    def built(cfg):
        raise AssertionError("pinned memory of the last job" if of_last_job() else "no memory")

    monkeypatch.setattr(training, "in_sweep", lambda: True)
    monkeypatch.setattr(training, "build", built)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with composed(tmp_path, *tiny(tmp_path)) as cfg, pytest.raises(AssertionError, match="no memory"):
            training.train(cfg)
    finally:
        if was_enabled:
            gc.enable()


def test_a_job_of_a_sweep_compiles_for_its_own_shapes(tmp_path, monkeypatch):
    def built(cfg):
        raise AssertionError("built")

    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.zeros(2))
    monkeypatch.setattr(training, "in_sweep", lambda: True)
    monkeypatch.setattr(training, "build", built)
    with composed(tmp_path, *tiny(tmp_path)) as cfg, pytest.raises(AssertionError, match="built"):
        training.train(cfg)
    with torch._dynamo.config.patch(error_on_recompile=True):  # a recompilation would be for dynamic shapes
        compiled(torch.zeros(3))


@pytest.mark.parametrize(
    ("error", "has_gpu"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. GPU 0 has 1.5 GiB free. Of the allocated memory 0 bytes"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (MemoryError(), False),
    ],
    ids=["weights", "context", "host"],
)
def test_too_little_memory_for_the_model_is_a_one_line_error(error, has_gpu, tmp_path, monkeypatch):
    def built(cfg, vocab_size):
        raise error

    monkeypatch.setattr(training, "build_model", built)
    monkeypatch.setattr("fa_train.callbacks.out_of_memory.torch.cuda.is_available", lambda: has_gpu)
    said = r"built: CUDA (out of memory\. GPU 0 has 1\.5 GiB free|error: out of memory)\. Other processes may use"
    with (
        composed(tmp_path, *tiny(tmp_path), "trainer.accelerator=cpu") as cfg,
        pytest.raises(ValueError, match=said if has_gpu else "built: out of memory$") as raised,
    ):
        training.train(cfg)
    assert is_out_of_memory(raised.value), "scripts/ablation/multirun.py must record the result oom"


@pytest.mark.parametrize(
    ("device", "n_gpus", "has_driver", "expected"),
    [
        pytest.param("cuda:1", 2, True, "GPU 1", id="second-gpu"),
        pytest.param("cpu", 2, True, "the CPU", id="accelerator=cpu"),
        pytest.param("cpu", 0, False, "a machine without a CUDA GPU", id="no-gpu"),
        pytest.param(
            "cpu", 0, True, "the CPU, because torch [^ ]+ cannot use this machine's NVIDIA GPU", id="cpu-build"
        ),
    ],
)
def test_a_run_says_on_which_gpu_it_is_and_why_it_uses_none(
    device, n_gpus, has_driver, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device.index if device else 0}")
    monkeypatch.setattr(preflight, "NVIDIA_DRIVER", tmp_path if has_driver else tmp_path / "no driver")
    assert re.fullmatch(expected, preflight.machine(torch.device(device)))
