"""Tokenises and packs the data of a training run in many processes.

If train.py then runs with the same overrides, it finds the prepared data.

    python -m scripts.prepare_data data=sft data.path=chats.jsonl data.tokenizer=path/or/hub-name workers=8    # chats.

The script takes all overrides of train.py, and --config-dir. Only the overrides of data and seq_len matter. `workers`
is the number of processes that tokenise; the default is one per core. The files do not depend on `workers`. If the
script is killed or runs out of disk space, the same command continues after the last finished shard.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from fa_train.errors import errors_in_one_line
from fa_train.output import outlive_readers, replace_unprintable
from scripts.composed import composed, without

if TYPE_CHECKING:  # only for type hints, because the import of torch and Lightning takes seconds
    from fa_train.data.datamodule import PackedDataModule


def main(arguments: list[str]) -> str:
    """Prepares the data and returns the report of packing as text.

    Raises: ValueError, HydraException or OmegaConfBaseException if an override is wrong.
    """
    workers, overrides = without("workers", arguments)
    if workers is not None and (not workers.isdecimal() or not int(workers)):
        raise ValueError(f"workers must be a positive integer; got {workers}")
    data: PackedDataModule = instantiate(composed(overrides).data)
    data.prepare_data(len(os.sched_getaffinity(0)) if workers is None else int(workers))
    return data.packing_report().text()


if __name__ == "__main__":
    outlive_readers()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    replace_unprintable()
    with errors_in_one_line((ValueError, HydraException, OmegaConfBaseException)):
        print(main(sys.argv[1:]))
