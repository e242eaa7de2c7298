"""Makes Hydra and OmegaConf compose and copy configs several times as fast.

An option is the config file that is chosen for a config group, such as `naive` in `attention=naive`. For each
combination of options, Hydra computes the list of config files and the composed config only once. Overrides that choose
no option, such as `seq_len=8`, are applied to a copy of the composed config. OmegaConf reads and writes YAML with
libyaml, parses equal interpolations once, and copies the metadata of a node without copy.deepcopy. Lightning searches
the installed packages for callbacks only once.

train.py itself uses the unchanged functions of Hydra, OmegaConf and Lightning. tests/test_conf.py checks that the
replacements in this file and the unchanged functions give the same configs.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf._utils
import omegaconf.base
import omegaconf.omegaconf
import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.fabric.utilities import registry
from omegaconf.base import Metadata

PYTHON_LOADER = yaml.SafeLoader
CONF = Path(__file__).parents[2] / "conf"
# No test changes the configs that Hydra loads from the places in `UNCHANGING`.
UNCHANGING = {f"file://{CONF}", "pkg://hydra.conf", "structured://"}
create_defaults_list = config_loader_impl.create_defaults_list
compose = ConfigLoaderImpl._compose_config_from_defaults_list
parse_rule = OverridesParser.parse_rule
_lists: dict[Any, DefaultsList] = {}
_configs: dict[int, Any] = {}  # {result of id() for a defaults list: config composed from this list}


def _create_defaults_list(
    repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    """A defaults list depends on the options, but not on other overrides."""
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
    if not any(defaults is found.defaults for found in _lists.values()):
        return compose(self, defaults, repo)
    if id(defaults) not in _configs:
        _configs[id(defaults)] = compose(self, defaults, repo)
    return copy.deepcopy(_configs[id(defaults)])


def _copy_metadata(self: Metadata, memo: dict[int, Any]) -> Metadata:
    """Only `flags` and `resolver_cache` are mutable, so the copies share all other values."""
    copied = copy.copy(self)
    copied.flags = None if self.flags is None else {**self.flags}
    copied.resolver_cache = copy.deepcopy(self.resolver_cache, memo)
    return copied


@cache
def _parse_rule(text: str, rule: str) -> Any:
    return parse_rule(OverridesParser.create(), text, rule)


@cache
def _dumper() -> Any:
    original = omegaconf._utils.get_omega_conf_dumper()
    return type("Dumper", (getattr(yaml, "CDumper", yaml.Dumper),), {"yaml_representers": original.yaml_representers})


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (omegaconf.base, "parse", cache(omegaconf.base.parse)),  # a parse tree never changes
    (omegaconf._utils, "parse", cache(omegaconf._utils.parse)),
    # returns a copy of the parsed override, because Hydra sets an attribute of each override
    (OverridesParser, "parse_rule", lambda self, text, rule: copy.copy(_parse_rule(text, rule))),
    (Metadata, "__deepcopy__", _copy_metadata),
    (registry, "entry_points", cache(registry.entry_points)),
    (omegaconf.omegaconf, "get_omega_conf_dumper", _dumper),
    (yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader)),  # OmegaConf looks up SafeLoader at each load
    (config_loader_impl, "create_defaults_list", _create_defaults_list),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", _compose),
]
ORIGINALS = [(owner, name, getattr(owner, name, None)) for owner, name, _ in REPLACEMENTS]
for owner, name, replacement in REPLACEMENTS:
    setattr(owner, name, replacement)
