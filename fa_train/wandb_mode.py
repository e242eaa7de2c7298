"""Chooses the mode of Weights & Biases.

A run never asks for an API key, and waits at most `TIMEOUT` seconds for the network.
"""

import os

import wandb

from fa_train.parallel.decisions import decided_by_rank_zero

TIMEOUT = 5  # the server must accept the API key within this number of seconds


def wandb_mode() -> str:
    """Returns the `mode` for wandb.init: $WANDB_MODE if set, "offline" without API key or network, else "online"."""
    mode: str = decided_by_rank_zero("wandb_mode", _mode)
    return mode


def _mode() -> str:
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    try:
        if not wandb.login(prompt=False, verify=False):
            print("wandb: no API key, so this run is logged offline (`wandb login` changes that)", flush=True)
            return "offline"
        wandb.Api(timeout=TIMEOUT)  # asks the server whether it accepts the API key
    except Exception as error:  # a run must not end because its login failed
        print(f"wandb: no login within {TIMEOUT} seconds ({error}), so this run is logged offline", flush=True)
        return "offline"
    return "online"
