"""Composes the config of train.py for scripts that need only parts of that config."""

from collections.abc import Collection

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fa_train.config_options import CONF
from fa_train.run_config import check, wandb_tags


def composed(overrides: list[str], unread: Collection[str] = ()) -> DictConfig:
    """Composes and checks the config. The result is what train.py composes on a machine with a GPU.

    unread: keys that need no value, because the script does not read them.
    Raises: ValueError, HydraException or OmegaConfBaseException if an override is wrong.
    """
    OmegaConf.register_new_resolver("auto_preset", lambda: "gpu", replace=True)
    if not OmegaConf.has_resolver("sweep_group"):  # train.py also registers it
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
