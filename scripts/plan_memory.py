"""Predicts the GPU and host memory of a run by component, without running it and without a GPU.

    python -m scripts.plan_memory model=llama_1b seq_len=131072 memory=selective    # llama_1b.
    python -m scripts.plan_memory model=llama_8b seq_len=65536 trainer.precision=bf16-true memory=auto gpu_gib=80  # 8B.

The script takes the overrides of train.py, and --config-dir. The default is preset=gpu. gpu_gib and host_gib set the
GPU memory and the host memory of one process, in GiB. The default of gpu_gib is the memory of this machine's GPU, or
139.8 without a GPU (an H200). The default of host_gib is the host memory of this machine, divided by trainer.devices.
With memory=auto, the script prints the longest seq_len for which at least one combination of memory levers fits.
"""

import sys
from pathlib import Path

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.errors import errors_in_one_line
from fa_train.output import outlive_readers


def main(arguments: list[str]) -> None:
    """Prints the memory table for train.py's overrides, or one line about a mistake in them."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    from scripts.memory_table import memory_table  # import late: torch takes seconds to import

    with errors_in_one_line((ValueError, HydraException, OmegaConfBaseException)):
        print(memory_table(arguments))


if __name__ == "__main__":
    outlive_readers()
    main(sys.argv[1:])
