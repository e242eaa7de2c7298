"""Asks the CUDA driver whether there is a GPU, without importing torch. Importing torch would take seconds."""

import ctypes
import runpy
from importlib.util import find_spec
from pathlib import Path


def has_gpu() -> bool:
    """Returns whether the installed torch can use a GPU. The result is False for a CPU build of torch.

    The result equals torch.cuda.is_available(). GPUs that CUDA_VISIBLE_DEVICES hides do not count. Like
    torch.cuda.is_available(), has_gpu() initialises CUDA in this process.
    """
    runtime = torch_cuda_version()
    if runtime is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False  # no driver
    version, gpus = ctypes.c_int(), ctypes.c_int()
    errors = [
        driver.cuInit(0),
        driver.cuDriverGetVersion(ctypes.byref(version)),
        driver.cuDeviceGetCount(ctypes.byref(gpus)),
    ]
    is_new_enough = version.value // 1000 >= int(runtime.partition(".")[0])  # 12080 is CUDA 12.8
    return not any(errors) and is_new_enough and gpus.value > 0


def torch_cuda_version() -> str | None:
    """Returns torch.version.cuda, for example "12.8". The result is None for a CPU build of torch."""
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    cuda: str | None = runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"]
    return cuda
