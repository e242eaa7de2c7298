"""The TMA copies of Gluon, under their names in Triton 3.6 and 3.7. Triton 3.8 added new names, and 3.9 has only those.

The functions themselves did not change.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = hasattr(tma, "async_load")
async_copy_global_to_shared = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
async_copy_shared_to_global = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
store_wait = tma.store_wait
