"""Tokenises and packs before a run, in many processes; train.py with the same overrides then finds it done.

    python -m scripts.prepare_data data=sft data.path=chats.jsonl data.tokenizer=path/or/hub-name workers=8

Takes train.py's overrides, of which only data's own and seq_len matter; and workers, how many processes tokenise: by
default one a core. The files are the same for any number of workers, and the same that train.py would write. Killed or
out of disk, the same command goes on after the last finished shard.
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as a file: import from the repository, not from scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from fa_train.data.datamodule import PackedDataModule
from fa_train.errors import explain
from scripts.composed import composed


def main(arguments: list[str]) -> str:
    """The report of packing. Raises: ValueError, HydraException or OmegaConfBaseException on a mistake."""
    workers, overrides = _taken_workers(arguments)
    data: PackedDataModule = instantiate(composed(overrides).data)
    data.prepare_data(workers)
    return data.packing_report().text()


def _taken_workers(arguments: list[str]) -> tuple[int, list[str]]:
    """The value of workers=value, and the other arguments."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith("workers=")]
    others = [argument for argument in arguments if not argument.startswith("workers=")]
    if not values:
        return len(os.sched_getaffinity(0)), others
    if not values[-1].isdecimal() or not int(values[-1]):
        raise ValueError(f"workers must be a positive integer; got {values[-1]}")
    return int(values[-1]), others


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    try:
        print(main(sys.argv[1:]))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error)}")
