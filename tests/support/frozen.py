"""Imports modules that train.py imports only when needed, composes configs that many tests need, and then excludes all
existing objects from garbage collection.

The server of tests.support.processes imports this module once. Without this module, each run would import the modules
and compose its config again, and the garbage collections of each run would scan all imported objects.
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
