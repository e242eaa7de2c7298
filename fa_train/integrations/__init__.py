"""This project's kernels inside other libraries."""
