"""Predicts the GPU and host memory of a run by component, without running it and without a GPU.

    python -m scripts.plan_memory model=llama_1b seq_len=131072 memory=selective
    python -m scripts.plan_memory model=llama_8b seq_len=262144 trainer.precision=bf16-true memory=auto gpu_gib=80

The script takes train.py's overrides, with preset=gpu by default. gpu_gib and host_gib set the memory of one GPU and of
one process. Their defaults are this machine's memory; host memory is divided by trainer.devices. Without a GPU, gpu_gib
is 139.8, as on an H200. With memory=auto, the script prints the longest seq_len that fits with any memory levers.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: import from the repository, not from scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.errors import explain


def main(arguments: list[str]) -> None:
    """Prints the table for train.py's overrides, or one line about a mistake in them."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    from scripts.memory_table import memory_table  # imports torch, which takes seconds

    try:
        print(memory_table(arguments))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error)}")


if __name__ == "__main__":
    main(sys.argv[1:])
