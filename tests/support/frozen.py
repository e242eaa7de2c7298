"""Imports what most runs import late, and excludes all objects created so far from garbage collection.

The server of tests.support.processes imports this module once. Otherwise each run would import these modules again, and
would scan all objects that imports have created.
"""

import gc

import pandas  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401

import fa_train.data.datamodule  # noqa: F401
import tests.support.fast_yaml  # noqa: F401

gc.collect()
gc.freeze()
gc.enable()
