"""Chooses the mode of Weights & Biases.

A run never asks for an API key, and waits at most `TIMEOUT` seconds for the network.
"""

import os

import requests
import wandb
from pydantic import ValidationError

from fa_train.parallel.decisions import decided_by_rank_zero
from fa_train.settings import fits, shown, wanted

TIMEOUT = 5  # the server must accept the API key within this number of seconds


def wandb_mode() -> str:
    """Returns the `mode` for wandb.init, which is $WANDB_MODE if this variable is set.

    Without $WANDB_MODE, the mode is "online" if the login succeeds, and "offline" if the login fails or there is no API
    key.
    """
    mode: str = decided_by_rank_zero("wandb_mode", _mode)
    return mode


def require_known_variables() -> None:
    """Raises: ValueError if wandb does not accept the value of one of its variables, such as WANDB_MODE or WANDB_TAGS.

    A wrong WANDB_API_KEY is no error, because a run without a valid key is logged offline.
    """
    for name in ("mode", "resume"):
        variable, known = f"WANDB_{name.upper()}", wandb.Settings.model_fields[name].annotation
        value = os.environ.get(variable)
        if value is not None and not fits(value, known):
            raise ValueError(f"{variable} must be {wanted(known).removesuffix(' or null')}; got {shown(value)}")
    for variable, value in os.environ.items():
        if variable.startswith("WANDB_") and variable != "WANDB_API_KEY":
            try:
                wandb.Settings().update_from_env_vars({variable: value})
            except (wandb.Error, ValueError) as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                got = f"{shown(value)}: {reason}"
                raise ValueError(f"{variable} must be a value that wandb accepts; got {got}") from error


def require_api_key(setting: str) -> None:
    """Raises: ValueError if no API key is set, or its format is wrong. Does not contact W&B's server.

    setting: the setting that needs an API key, such as WANDB_MODE=online, for the error message.
    """
    try:
        found = "a key" if wandb.login(prompt=False, verify=False) else "none"
    except Exception as error:  # the key has a wrong format
        found = str(error)
    if found != "a key":
        raise ValueError(
            f"{setting} needs an API key of W&B; got {found}. Run `wandb login`, set WANDB_API_KEY, "
            f"or choose {setting.removesuffix('online')}offline"
        )


def _mode() -> str:
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    try:
        if not wandb.login(prompt=False, verify=False):
            print("wandb: no API key, so this run is logged offline. Run `wandb login` to log online", flush=True)
            return "offline"
        _require_login()
    except Exception as error:  # a run must not end because its login failed
        print(f"wandb: login failed ({error}), so this run is logged offline", flush=True)
        return "offline"
    return "online"


def _require_login() -> None:
    """Raises an error if the server does not answer or does not accept the API key.

    If there is an API key, _require_login does not use wandb.Api. wandb.Api asks the server through wandb's service
    process. If the server does not answer, the service process keeps waiting for the server, and can delay the end of
    the program.
    """
    settings = wandb.setup().settings
    if settings.api_key is None:  # without an API key, the login uses an identity token
        wandb.Api(timeout=TIMEOUT)
        return
    query = {"query": "query Viewer { viewer { id } }"}
    auth = ("api", settings.api_key)
    answer = requests.post(f"{settings.base_url}/graphql", json=query, auth=auth, timeout=TIMEOUT)
    if not answer.ok or "errors" in answer.json():
        raise ConnectionError(f"HTTP status {answer.status_code}: {answer.text[:200]}")
