"""Chooses the mode of Weights & Biases. A run never asks for a key, and waits at most TIMEOUT for the network."""

import os

import wandb

from fa_train.parallel.decisions import decided_by_rank_zero

TIMEOUT = 5  # seconds within which the server must accept the key


def wandb_mode() -> str:
    """Returns the `mode` for wandb.init: $WANDB_MODE if set, "offline" without a key or a network, else "online"."""
    mode: str = decided_by_rank_zero("wandb_mode", _mode)
    return mode


def _mode() -> str:
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    try:
        if not wandb.login(prompt=False, verify=False):
            print("wandb: no API key, so this run is logged offline (`wandb login` changes that)", flush=True)
            return "offline"
        wandb.Api(timeout=TIMEOUT)  # asks the server whether it accepts the key
    except Exception as error:  # a failed login must not end the run
        print(f"wandb: no login within {TIMEOUT} seconds ({error}), so this run is logged offline", flush=True)
        return "offline"
    return "online"
