"""Composes the config of train.py for scripts that need only parts of that config."""

import argparse
from collections.abc import Collection
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fa_train.command_line import require_form
from fa_train.config_options import CONF, in_quotes
from fa_train.run_config import check, wandb_tags


def composed(arguments: list[str], unread: Collection[str] = ()) -> DictConfig:
    """Composes and checks the config. The result is what train.py composes on a machine with a GPU.

    arguments: overrides of train.py, and optionally --config-dir.
    unread: keys that need no value, because the script does not read them.
    Raises: ValueError, HydraException or OmegaConfBaseException if an argument is wrong.
    """
    overrides = _overrides(arguments)
    OmegaConf.register_new_resolver("auto_preset", lambda: "gpu", replace=True)
    if not OmegaConf.has_resolver("sweep_group"):  # train.py also registers this resolver
        OmegaConf.register_new_resolver("sweep_group", lambda: None)
    OmegaConf.register_new_resolver("wandb_tags", wandb_tags, replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [*overrides, "hydra.runtime.output_dir=."], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)  # makes interpolations such as ${hydra:runtime.choices.model} work
    with open_dict(cfg):
        del cfg.hydra
    for key in unread:
        node, name = key.rsplit(".", 1)
        if OmegaConf.is_missing(OmegaConf.select(cfg, node), name):
            OmegaConf.update(cfg, key, "unread")
    check(cfg)
    return cfg


def without(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Separates `name=VALUE`, which is no override of train.py, from the other arguments of a script.

    Returns the last VALUE (None if there is none) and the other arguments.
    """
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{name}=")]
    others = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    return values[-1] if values else None, others


def _overrides(arguments: list[str]) -> list[str]:
    """Replaces --config-dir with the override that has the same effect, because Hydra's `compose` takes no options.

    Raises: ValueError if the folder does not exist, or if another option is given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    try:
        given, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError("--config-dir must be a folder with config files; got nothing") from error
    for override in overrides:
        if override.startswith("-"):
            raise ValueError(f"the arguments must be overrides of train.py or --config-dir; got {override}")
    require_form(overrides)
    folder = given.config_dir
    if folder is None:
        return overrides
    if not folder.is_dir():
        raise ValueError(f"--config-dir must be a folder with config files; got {folder}")
    return [f"hydra.searchpath=[{in_quotes(f'file://{folder.absolute()}')}]", *overrides]
