"""Prepares the server of tests.support.processes, so that the runs that it forks start quickly.

The server imports this module once. This module imports modules that train.py imports only when needed, so runs need
not import them again. The module also composes configs that many tests need, so runs need not compose these configs
again. Finally, the module excludes all existing objects from garbage collection, so collections in a run do not scan
them.
"""

import gc
from pathlib import Path

import pandas  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
from hydra.core.hydra_config import HydraConfig

import fa_train.data.datamodule  # noqa: F401
import tests.support.fast_configs  # noqa: F401
from tests.support.training import TINY, composed

for choice in ((), ("strategy=fsdp",), ("adapter=lora",)):  # many runs of the tests choose these options
    with composed(Path(), *TINY, *choice):
        pass
HydraConfig.instance().cfg = None

gc.collect()
gc.freeze()
gc.enable()
