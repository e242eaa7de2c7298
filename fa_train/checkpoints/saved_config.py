"""Checks a run's saved config before Hydra instantiates it, because the file may come from an untrusted source."""

import importlib
from collections.abc import Mapping, Sequence
from types import FunctionType

# A config may name only classes and functions that `PACKAGES` define, because others can be unsafe. For example,
# fa_train.private_names.private_module can import any module.
PACKAGES = "fa_train.models", "fa_train.memory"


def require_own_targets(config: object, where: str) -> None:
    """Checks that every `_target_` in a config is a class or function that one of `PACKAGES` defines.

    Checking only the start of a name is not enough: fa_train.models.hf.export.shutil.rmtree would pass.
    config: a config whose interpolations are resolved, or a part of such a config.
    where: the config's name, for the error message.
    Raises: ValueError if the config has a `_target_` that no package in `PACKAGES` defines. The message names the
    first wrong `_target_`.
    """
    if isinstance(config, Mapping):
        if "_target_" in config and not _is_own(config["_target_"]):
            raise ValueError(
                f"{where} must contain only targets that {' or '.join(PACKAGES)} defines; "
                f"got _target_: {config['_target_']}"
            )
        for value in config.values():
            require_own_targets(value, where)
    elif isinstance(config, Sequence) and not isinstance(config, str | bytes):
        for value in config:
            require_own_targets(value, where)


def _is_own(target: object) -> bool:
    if not isinstance(target, str) or not _is_inside(target):
        return False
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    found = getattr(module, name, None)
    return isinstance(found, type | FunctionType) and _is_inside(found.__module__)


def _is_inside(name: str) -> bool:
    return name.startswith(tuple(f"{package}." for package in PACKAGES))
