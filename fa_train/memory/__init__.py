"""Reduces the GPU memory that long sequences need, and predicts how much memory a run needs."""
