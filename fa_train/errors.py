"""Errors that end a run. A user's mistake is reported in one line, without a traceback."""

import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml

from fa_train.config_options import COPIED_NODES, OTHER_NAMES, in_quotes, options, options_with
from fa_train.parallel.ctrl_c import INTERRUPTED
from fa_train.settings import unknown_key

SHOW_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk has no space left, or the user's quota is used up
# no permission, a read-only file system, or a path below a file
UNUSABLE = (errno.EACCES, errno.EROFS, errno.ENOTDIR)


class DivergedError(RuntimeError):
    """Raised on all ranks after the same step, if the run must not go on.

    The cause is NaN or infinity in the gradients of too many consecutive steps, or weights that differ between ranks.
    """


class TrainedWeightsError(ValueError):
    """Raised if a callback changes which weights are trained, and the strategy does not support the change."""


class OutOfMemoryError(RuntimeError):
    """Raised if a rank runs out of GPU or host memory. The message says what to change."""


class RankFailedError(RuntimeError):
    """Raised if a rank failed. The message names the rank and the reason."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


@contextmanager
def errors_in_one_line(mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """If Ctrl-C or an error of a type in `mistakes` occurs, prints one line and ends the program.

    An error for which `is_of_disk` is true is also printed in one line. HYDRA_FULL_ERROR=1 shows a traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        if SHOW_TRACEBACK:
            raise
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if SHOW_TRACEBACK or not (isinstance(error, mistakes) or is_of_disk(error)):
            raise
        sys.exit(f"error: {explain(error)}")


def is_of_disk(error: BaseException) -> bool:
    """Returns whether the error means that the disk is full, or that a path cannot be used."""
    return isinstance(error, OSError) and error.errno in FULL + UNUSABLE


def explain(error: BaseException) -> str:
    """Returns an error's message in one line.

    If Hydra has wrapped a ValueError or a MisconfigurationException of Lightning, returns the wrapped error's message.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if line := _of_unknown_key(chain) or _of_unknown_option(chain):
        return line
    if line := _of_group(str(error)) or _of_added_group(str(error)) or _of_override(error):
        return line
    # the module of Lightning's MisconfigurationException is not imported here, because the import takes seconds
    is_mistake = [isinstance(link, ValueError) or type(link).__name__ == "MisconfigurationException" for link in chain]
    said = chain[is_mistake.index(True)] if any(is_mistake) else error
    # str.partition removes Hydra's search path from the message
    text = _of_data_worker(said).partition("Config search path")[0].partition("full_key")[0]
    text = " ".join(text.removeprefix("ValueError raised while resolving interpolation: ").split())
    if is_of_disk(said):
        return f"a file cannot be read or written: {text}"
    cause = chain[-1]
    if isinstance(cause, OSError) and is_of_disk(cause) and str(cause.strerror) not in text:
        return f"{text}: {cause}"
    return text


def _of_unknown_key(chain: Sequence[BaseException]) -> str | None:
    """Returns the message for an override of a key that is not in the config. Returns None for other errors.

    chain: an error and its causes.
    """
    unknown = next((link for link in chain if hasattr(link, "parent_node") and "in struct" in str(link)), None)
    if unknown is None:
        return None
    key, siblings = vars(unknown)["full_key"], vars(unknown)["parent_node"]
    if siblings:
        text = unknown_key(key, siblings)
        is_known = unknown is chain[0] or options_with(key) or key in OTHER_NAMES
        return text if is_known else f"{text} (to add a parameter that conf/ does not list, write + before it)"
    for copied, original in COPIED_NODES.items():
        if key.startswith(f"{copied}."):  # Hydra has replaced the interpolation by an empty node
            wanted = original + key.removeprefix(copied)
            return f"{key} cannot be set, because {copied} is a copy of {original}. Set {wanted} instead"
    return None


def _of_unknown_option(chain: Sequence[BaseException]) -> str | None:
    """Returns the message for an override that chooses an option that is not in conf/. Returns None for other errors.

    chain: an error and its causes.
    """
    for link in chain:
        if getattr(link, "missing_cfg_file", None) and getattr(link, "options", None):
            group, _, option = vars(link)["missing_cfg_file"].rpartition("/")
            names = [name for name in vars(link)["options"] if not name.startswith("_")]
            return f"{group} must be one of {', '.join(names)}; got {option}"
    return None


def _of_group(text: str) -> str | None:
    """Returns the message for an override that chooses no option of a config group, such as logger=null or ~logger.

    text: the message of Hydra or OmegaConf. Returns None for messages about other errors.
    """
    group, given = "", "nothing"
    if text.startswith("Config group override must be a string"):  # Hydra's message does not name the group
        for argument in sys.argv[1:]:
            name, _, value = argument.partition("=")
            if value and options(name) and not isinstance(yaml.safe_load(value), str | list):
                group, given = name, value
    elif (missing := re.match(r"Interpolation key '(\w+)", text)) and f"~{missing[1]}" in sys.argv:
        group = missing[1]
    if not group or not options(group):
        return None
    advice = ". trainer.logger=false switches logging off" if group == "logger" else ""
    return f"{group} must be one of {', '.join(options(group))}; got {given}{advice}"


def _of_added_group(text: str) -> str | None:
    """Returns the message for an override such as +experiment=finetune, which adds a group that the config already has.

    Returns None for other errors. text: the message of Hydra.
    """
    again = re.match(r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'", text)
    if not again or not any(argument.startswith(f"+{again[1]}=") for argument in sys.argv):
        return None  # the group may be in the defaults list of a user's file
    group, option = again.groups()
    return f"{group} is already a group of conf/train.yaml. Write {group}={option} without +"


def _of_override(error: BaseException) -> str | None:
    """Returns the message for an override that Hydra cannot read, such as data.path=/home/José.

    Returns None for other errors.
    """
    key, _, value = str(getattr(error, "override", "")).partition("=")  # an attribute of OverrideParseException
    if not value or " while evaluating " in str(error):  # Hydra explains errors of its functions, such as range(a)
        return None
    return (
        f"{key} must be a value that Hydra can read; got {value}. If it is text, quote it for Hydra and for the shell: "
        + shlex.quote(f"{key}={in_quotes(value)}")
    )


def _of_data_worker(error: BaseException) -> str:
    """Returns an error's message, without the traceback that torch adds if the error occurred in a data worker."""
    text = str(error)
    if not re.match(r"Caught \w+ in DataLoader worker process", text):
        return text
    return re.split(rf"^(?:\w+\.)*{type(error).__name__}: ", text, flags=re.MULTILINE)[-1]
