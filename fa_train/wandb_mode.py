"""Whether Weights & Biases can be reached: a run must never wait for a key or for a network."""

import os
import urllib.error
import urllib.request

import wandb

TIMEOUT = 5.0  # seconds


def wandb_mode() -> str:
    """What wandb.init's `mode` should be: $WANDB_MODE where set, else online, or offline without key or network."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if not wandb.login(prompt=False):
        print("wandb: no API key, so this run is logged offline (`wandb login` changes that)", flush=True)
        return "offline"
    url = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(url, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return "online"  # an error of the server's is an answer
    except OSError as error:
        print(f"wandb: {url} does not answer ({error}), so this run is logged offline", flush=True)
        return "offline"
    return "online"
