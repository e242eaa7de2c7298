"""Checks the config of a run that Hydra has composed, before torch or Lightning is imported."""

from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fa_train import compat, settings


def in_sweep() -> bool:
    """Returns whether this run is part of a multirun of Hydra."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def check(cfg: DictConfig) -> None:
    """Checks all keys and values of a config. Replaces each `_target_` of an earlier version with its current name.

    Raises: ValueError, which names the first key that is unknown or has an invalid value.
    """
    for key, target in compat.moved_targets(to_container(cfg, resolve=False)).items():
        OmegaConf.update(cfg, key, target)
    chosen = HydraConfig.get().runtime.choices
    for group in settings.ONE_OPTION:
        if group in cfg and group not in chosen:  # true if Hydra has merged several options
            raise ValueError(f"{group} must be one option of conf/{group}; got a list of them")
    for group, option in cfg.choices.items():
        if option != chosen.get(group):
            raise ValueError(f"choices.{group} only records the option; choose one with {group}={option}")
    settings.require_given(to_container(cfg, resolve=False))
    settings.check(to_container(cfg))


def to_container(cfg: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Converts a config to dicts and lists."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=resolve))
