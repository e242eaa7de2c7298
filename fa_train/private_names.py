"""Access to private names of other packages. If a name does not exist, an error names the version to install."""

import importlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Literal

Package = Literal["datasets", "lightning", "liger-kernel", "torch", "torchao", "transformers"]
TESTED: dict[Package, str] = {
    "datasets": "5.2.0", "lightning": "2.6.6", "liger-kernel": "0.8.5", "torch": "2.15.0", "torchao": "0.18.0",
    "transformers": "5.24.0",
}  # fmt: skip


def require_names(package: Package, owner: object, *names: str) -> None:
    """Checks that an object from `package` has the attributes `names`. Raises: ImportError if a name is missing."""
    for name in names:
        if not hasattr(owner, name):
            what = getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(f"{_installed(package)} has no {what}.{name}. {_advice(package)}")


def require_parameters(package: Package, function: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Checks that a function has the expected parameters. Raises: ImportError if `found` and `wanted` differ."""
    different = sorted(set(found) ^ set(wanted))
    if different:
        raise ImportError(
            f"in {_installed(package)}, {function} has other parameters than expected; they differ in "
            f"{', '.join(different)}. {_advice(package)}"
        )


def private_module(package: Package, name: str) -> Any:
    """Returns a private module of `package`. Raises: ImportError if the module does not exist."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{_installed(package)} has no module {name}. {_advice(package)}") from error


def private(package: Package, owner: object, name: str) -> Any:
    """Returns the attribute `name` of `owner`. Raises: ImportError if the attribute does not exist."""
    require_names(package, owner, name)
    return getattr(owner, name)


def replace_private(package: Package, owner: object, name: str, value: object) -> None:
    """Sets the existing attribute `name` of `owner`. Raises: ImportError if the attribute does not exist."""
    require_names(package, owner, name)
    setattr(owner, name, value)


def _installed(package: Package) -> str:
    return f"{package} {version(package)}"


def _advice(package: Package) -> str:
    return f"Install the version that was tested: {package}=={TESTED[package]}"
