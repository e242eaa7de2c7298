"""Gluon's functions for TMA copies, under their names in Triton 3.6 and 3.7.

Triton 3.8 renamed two of the functions. In Triton 3.9, functions with the old names exist, but raise an error.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = hasattr(tma, "async_load")
async_copy_global_to_shared = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
async_copy_shared_to_global = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
store_wait = tma.store_wait
