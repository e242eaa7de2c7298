"""Makes the kernels of this repository available in other libraries."""
