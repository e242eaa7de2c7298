"""Makes Hydra compose configs three times as fast. Most tests compose a config.

An option is the config file that is chosen for a config group, such as `naive` in `attention=naive`. For each
combination of options, Hydra computes the list of config files and the composed config only once. Other overrides, such
as `seq_len=8`, are then applied to a copy of this config. OmegaConf reads YAML with libyaml.

train.py itself uses Hydra's own functions, and a YAML loader that is written in Python. tests/test_conf.py checks that
both ways give the same configs.
"""

import copy
from pathlib import Path
from typing import Any

import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList

PYTHON_LOADER = yaml.SafeLoader
CONF = Path(__file__).parents[2] / "conf"
UNCHANGING = {f"file://{CONF}", "pkg://hydra.conf", "structured://"}  # sources of configs that no test changes
create_defaults_list = config_loader_impl.create_defaults_list
compose = ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[Any, DefaultsList] = {}
_configs: dict[int, Any] = {}  # the key is the id of a defaults list


def _create_defaults_list(
    repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    """Replaces Hydra's function of this name. The list depends on the options, but not on other overrides."""
    if {f"{x.scheme()}://{x.path}" for x in repo.get_sources()} - UNCHANGING:
        return create_defaults_list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    overrides = [x for x in overrides_list if not x.is_sweep_override()]
    options = [x for x in overrides if repo.group_exists(x.key_or_group) and not isinstance(x.value(), dict)]
    key = config_name, tuple(x.input_line for x in options), prepend_hydra, skip_missing
    if key not in _lists:
        _lists[key] = create_defaults_list(repo, config_name, options, prepend_hydra, skip_missing)
    found = copy.copy(_lists[key])
    found.config_overrides = [x for x in overrides if x not in options]
    return found


def _compose(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """Replaces Hydra's method of this name."""
    if not any(defaults is found.defaults for found in _lists.values()):
        return compose(self, defaults, repo)
    if id(defaults) not in _configs:
        _configs[id(defaults)] = compose(self, defaults, repo)
    return copy.deepcopy(_configs[id(defaults)])


vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf looks the name up at each load
vars(config_loader_impl)["create_defaults_list"] = _create_defaults_list
setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _compose)  # noqa: B010
