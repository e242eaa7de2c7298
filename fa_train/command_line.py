"""Checks the form of the arguments of train.py before Hydra reads them.

An option starts with a dash, such as --config-dir. An override sets a key, such as seq_len=4096.
"""

import re
import shlex
from collections.abc import Sequence

# The options of Hydra that take no value, and those that take a value. Hydra also accepts the start of a long name.
FLAGS = ("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--shell-completion",
         "-h", "-r", "-m", "-sc")  # fmt: skip
VALUED = ("--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
          "-c", "-p", "-cp", "-cn", "-cd", "-i")  # fmt: skip
WANTED = "an override must have the form key=value"


def require_form(arguments: Sequence[str]) -> None:
    """Checks that each argument is an option of Hydra or has the form of an override.

    Raises: ValueError, which names the first wrong argument and says what to write instead.
    """
    overrides: list[int] = []  # indices of `arguments`
    i = 0
    while i < len(arguments) and arguments[i] != "--":  # all arguments after -- are overrides
        argument, following = arguments[i], "".join(arguments[i + 1 : i + 2])
        if argument.startswith("-"):
            _require_option(argument, following)
            i += 1 + (_is_one_of(argument, VALUED) and "=" not in argument)
            continue
        if argument.strip():
            _require_override(argument, following, "".join(arguments[i + 2 : i + 3]))
        if overrides and overrides[-1] != i - 1:
            options = " ".join(arguments[overrides[-1] + 1 : i])
            raise ValueError(f"overrides must stand together, without options among them; got {options} between them")
        overrides.append(i)
        i += 1
    if overrides and any(argument.startswith("--hyd") for argument in arguments):
        raise ValueError(f"--hydra-help takes no overrides; got {arguments[overrides[0]]}")


def sweep_folder_mistake(error: ValueError, arguments: Sequence[str]) -> str | None:
    """Returns a message if Hydra failed because the folder of a multirun needs a run's settings, and otherwise None."""
    folder = next((x for x in arguments if x.lstrip("+").startswith("hydra.sweep.dir=")), None)
    if folder is None or "HydraConfig was not set" not in str(error):
        return None
    return (
        "hydra.sweep.dir must not contain run_name or another setting of a run, because Hydra creates the folder "
        f"before it reads the settings of the first run; got {folder}"
    )


def _require_option(argument: str, following: str) -> None:
    """Raises: ValueError if an argument that starts with a dash is not an option of Hydra."""
    if _is_one_of(argument, (*FLAGS, *VALUED)):
        return
    key, equals, value = argument.lstrip("-").partition("=")
    if not equals and not argument.startswith("--"):
        return  # short options can be joined, as in -cjob
    if not equals and following and "=" not in following and not following.startswith("-"):
        argument, equals, value = f"{argument} {following}", "=", following
    override = f"{key.replace('-', '_')}={value}" if equals else f"{key.replace('-', '_')}=VALUE"
    raise ValueError(f"{argument} is no option. Write a setting without dashes: {shlex.quote(override)}")


def _is_one_of(argument: str, options: Sequence[str]) -> bool:
    name = argument.partition("=")[0]
    return name in options or (name.startswith("--") and any(option.startswith(name) for option in options))


def _require_override(argument: str, second: str, third: str) -> None:
    """Raises: ValueError if `argument` does not have the form of an override. second, third: the next arguments."""
    key, equals, value = argument.partition("=")
    if equals and not key.strip():
        raise ValueError(f"{WANTED}; got {argument}, which has no key")
    if value or key.startswith("~"):  # ~key removes a key
        return
    parts = [argument, second, third] if second == "=" else [argument, second]
    is_text_only = re.fullmatch(r"[^=~-][^=]*", second) is not None
    if second.startswith("=") or (equals and is_text_only):
        raise ValueError(f"{WANTED}, without spaces; got {' '.join(parts)}. Write {shlex.quote(''.join(parts))}")
    if not equals:
        raise ValueError(f"{WANTED}, such as seq_len=4096; got {argument}")
