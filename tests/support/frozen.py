"""Imports modules that train.py imports only when it needs them, composes configs that many tests need, and excludes
all objects created so far from garbage collection.

The server of tests.support.processes imports this module once. Without it, each run would import these modules and
compose its config again, and its garbage collections would scan all objects from the imports.
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
