"""Restores optimizers from checkpoints.

A restored optimizer has the settings of the new run, such as lr, and not the settings of the checkpoint. The optimizers
in `KINDS` reject a checkpoint that another kind of optimizer wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


def with_own_settings(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the state_dict `saved` with the optimizer's current settings, such as lr and betas.

    Moments and step counts do not change.
    """
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if len(own) != len(saved["param_groups"]):
        return saved  # torch raises an error
    groups = [group | settings for group, settings in zip(saved["param_groups"], own, strict=True)]
    return saved | {"param_groups": groups}


KINDS = (
    "adamw",
    "adamw_8bit",
    "adamw_bf16",
    "adamw_master",
    "adamw_offload",
)  # the names of functions in adamw.py and of YAML files in conf/optimizer


def require_same_kind(configured: Callable[..., Optimizer], saved: Mapping[str, Any]) -> None:
    """Checks that the configured optimizer can load the state_dict `saved`.

    configured: a function named in `KINDS`, or a functools.partial of it. Any other optimizer is not checked.
    Raises: ValueError if another optimizer wrote `saved`.
    """
    own = getattr(configured, "func", configured).__name__
    if own not in KINDS:
        return  # the state of a user's optimizer has an unknown format
    written_by = kinds_that_write(saved)
    if own not in written_by:
        got = f"one of optimizer={' or '.join(written_by)}" if written_by else "one that no optimizer in conf/ wrote"
        raise ValueError(f"ckpt_path must be a checkpoint of optimizer={own}; got {got}")


def kinds_that_write(saved: Mapping[str, Any]) -> Sequence[str]:
    """Returns the optimizers that may have written the state_dict `saved`, as names in `KINDS`.

    The result is empty if no optimizer in `KINDS` can have written `saved`.
    """
    if "offloaded" in saved:
        return ["adamw_offload"]
    states = saved["state"].values()
    if any("exp_avg" not in state for state in states) or any("betas" not in group for group in saved["param_groups"]):
        return []
    if any("fused" in group for group in saved["param_groups"]):
        return ["adamw"]
    if any("low_bits" in state for state in states):
        return ["adamw_master"]
    if not states:  # no parameter has had a gradient yet
        return ["adamw_8bit", "adamw_bf16", "adamw_master"]
    moments = [state["exp_avg"] for state in states]
    if any(isinstance(moment, dict) for moment in moments):
        return ["adamw_8bit"]
    if any(moment.numel() >= 4096 and moment.numel() % 256 == 0 for moment in moments):  # adamw_8bit quantizes these
        return ["adamw_bf16"]
    return ["adamw_8bit", "adamw_bf16"]
