"""Optimizers, the learning-rate schedule, and how both resume from a checkpoint."""
