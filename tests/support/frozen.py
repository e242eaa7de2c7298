"""Imports modules that train.py imports only when it needs them, and excludes all objects created so far from garbage
collection.

The server of tests.support.processes imports this module once. Without it, each run would import these modules again,
and its garbage collections would scan all objects from the imports.
"""

import gc

import pandas  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401

import fa_train.data.datamodule  # noqa: F401
import tests.support.fast_yaml  # noqa: F401

gc.collect()
gc.freeze()
gc.enable()
