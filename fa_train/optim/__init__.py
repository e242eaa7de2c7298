"""Optimizers and the learning-rate schedule, and how they resume from a checkpoint."""
