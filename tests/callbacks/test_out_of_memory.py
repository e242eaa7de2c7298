"""Tests the advice that a run prints if it runs out of GPU memory."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa_train.callbacks import out_of_memory
from fa_train.callbacks.out_of_memory import OutOfMemory, is_out_of_memory, out_of_memory_advice
from fa_train.parallel.failures import kind_of
from fa_train.parallel.fsdp import FullyShardedStrategy


@pytest.mark.parametrize(
    ("strategy", "advises"),
    [
        pytest.param(FullyShardedStrategy(1, False, False, "float32"), True, id="gathered"),
        pytest.param(FullyShardedStrategy(1, True, False, "float32"), False, id="resharded"),
        pytest.param(SimpleNamespace(), False, id="not-sharded"),
    ],
)
def test_blocks_that_stayed_gathered_are_named(strategy, advises, monkeypatch):
    monitor = SimpleNamespace(latest={})
    monkeypatch.setattr(out_of_memory, "monitor_of", lambda trainer: monitor)
    callback = OutOfMemory(64, 2, "flash")
    trainer: Any = SimpleNamespace(strategy=strategy, loggers=[], world_size=2, global_step=3, callbacks=[callback])
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    callback.on_exception(trainer, module, torch.OutOfMemoryError())
    assert monitor.latest["oom"] == 1
    advice = out_of_memory_advice(trainer)
    assert advice.startswith("out of memory: seq_len=64 ") and "data.micro_batch_size=1, or a smaller" in advice
    assert ("strategy.reshard_after_forward=true" in advice) == advises


GPU, CPU = torch.device("cuda"), torch.device("cpu")
TORCH = "CUDA out of memory. Tried to allocate 512.00 GiB. GPU 0 has a total capacity of 139.80 GiB"


@pytest.mark.parametrize(
    ("device", "attention", "memory", "reserved", "others", "message", "expected"),
    [
        pytest.param(CPU, "flash", "default", 79, 0, "", "the device has (peak use 7.5 GiB). Try data.", id="cpu"),
        pytest.param(GPU, "flash", "default", 79, 0, "", "the device has (peak use 7.5 GiB). Try memory=", id="gpu"),
        pytest.param(GPU, "flash", "auto", 79, 0, "", "the device has (peak use 7.5 GiB). Try data.micro", id="auto"),
        pytest.param(
            GPU, "naive", "full", 79, 0, TORCH,
            "the device has (peak use 7.5 GiB; the failed allocation needed 512.00 GiB). Try attention=flash, ",
            id="naive",
        ),
        pytest.param(
            GPU, "flash", "auto", 79, 2**37, "",
            "is free (peak use 7.5 GiB; other processes use 128.0 GiB of the device). Try data.micro",
            id="shared-gpu",
        ),
        pytest.param(
            GPU, "flash", "auto", 8, 0, TORCH.replace("512", "1"),
            "was free (peak use 7.5 GiB; the failed allocation needed 1.00 GiB; the device has 80.0 GiB; other "
            "processes probably used the rest). Try data.micro",
            id="gpu-was-shared",
        ),
        pytest.param(
            GPU, "flash", "auto", 8, 0, "NCCL error: Cuda failure 'out of memory'", "was free (peak", id="shared-nccl"
        ),
        pytest.param(
            GPU, "flash", "auto", 8, 0, "DefaultCPUAllocator: can't allocate memory", "the device has (peak", id="host"
        ),
    ],
)  # fmt: skip
def test_the_error_says_what_is_lacking_and_what_to_try(
    device, attention, memory, reserved, others, message, expected, monkeypatch, capsys
):
    monkeypatch.setattr(out_of_memory, "monitor_of", lambda trainer: SimpleNamespace(latest={}))
    monkeypatch.setattr(out_of_memory, "memory", lambda device: {"perf/peak_gib": 7.5, "perf/reserved_gib": reserved})
    monkeypatch.setattr(out_of_memory, "bytes_of_others", lambda device: others)
    monkeypatch.setattr(out_of_memory, "device_bytes", lambda device: 80 * 2**30)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), loggers=[], world_size=1, global_step=3)
    module: Any = SimpleNamespace(device=device)
    OutOfMemory(64, 2, attention, memory).on_exception(trainer, module, torch.OutOfMemoryError(message))
    assert f"needs more memory than {expected}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:77. Cuda failure 'out of memory'"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:77, remote process exited"), False),
        (ValueError("memory=auto found no memory settings"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_memory_can_run_out_in_libraries_other_than_torch(error, expected):
    assert is_out_of_memory(error) == expected
    if expected:
        assert kind_of(error) == "error"  # another rank is not the cause; fit raises an OutOfMemoryError
