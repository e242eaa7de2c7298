"""What must hold before a run starts. Each failure is a ValueError that says what was wanted and what came."""

import os
from pathlib import Path

import torch
from torch import nn

BYTES_A_PARAMETER = 16  # fp32 weight and gradient, and AdamW's two moments


def require_counts(**counts: object) -> None:
    """Each must be a positive integer."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} must be a positive integer; got {count}")


def require_memory(model: nn.Module, device: torch.device) -> None:
    """The weights, gradients and AdamW's moments must fit the device, or the host where that is the device."""
    parameters = sum(p.numel() for p in model.parameters())
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = parameters * BYTES_A_PARAMETER
    if needed > available:
        raise ValueError(
            f"{parameters / 1e9:.2f}B parameters need {needed / 2**30:.1f} GiB for weights, gradients and AdamW's "
            f"moments; {device} has {available / 2**30:.1f} GiB. Choose a smaller model"
        )


def checkpoint_path(ckpt_path: str | None, runs: Path) -> str | None:
    """`ckpt_path` itself, or for `last` the newest checkpoint below the folder `runs`."""
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        found = sorted(runs.glob("**/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            raise ValueError(f"ckpt_path=last found no checkpoint below {runs}; run_name chooses the folder")
        return str(found[-1])
    if not Path(ckpt_path).exists():
        raise ValueError(f"ckpt_path must be a checkpoint or `last`; {ckpt_path} does not exist")
    return ckpt_path


def machine() -> str:
    """What a preset is chosen by."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a CUDA GPU"


def explain(error: BaseException) -> str:
    """In one line, the ValueError that Hydra wrapped, or what Hydra itself found wrong."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    said = next((link for link in chain if isinstance(link, ValueError)), error)
    text = str(said).partition("Config search path")[0].partition("full_key")[0]  # where Hydra looked
    return " ".join(text.split())
