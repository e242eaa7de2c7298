"""Access to private names of other packages. A missing name ends the run and names the version to install."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Literal

Package = Literal["datasets", "lightning", "liger-kernel", "torchao"]
TESTED: dict[Package, str] = {"datasets": "5.2.0", "lightning": "2.6.6", "liger-kernel": "0.8.5", "torchao": "0.18.0"}


def require_names(package: Package, owner: object, *names: str) -> None:
    """Raises: ImportError unless `owner`, a part of `package`, has all these attributes."""
    for name in names:
        if not hasattr(owner, name):
            what = getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(f"{_installed(package)} has no {what}.{name}. {_advice(package)}")


def require_parameters(package: Package, function: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raises: ImportError unless `function` of `package` has exactly the parameters that it is called with."""
    different = sorted(set(found) ^ set(wanted))
    if different:
        raise ImportError(
            f"{_installed(package)} has other parameters of {function}: {', '.join(different)}. {_advice(package)}"
        )


def private(package: Package, owner: object, name: str) -> Any:
    """owner.name. Raises: ImportError as require_names does."""
    require_names(package, owner, name)
    return getattr(owner, name)


def replace_private(package: Package, owner: object, name: str, value: object) -> None:
    """owner.name = value. Raises: ImportError if owner has no such attribute yet, as require_names does."""
    require_names(package, owner, name)
    setattr(owner, name, value)


def _installed(package: Package) -> str:
    return f"{package} {version(package)}"


def _advice(package: Package) -> str:
    return f"Install the version that was tested: {package}=={TESTED[package]}"
