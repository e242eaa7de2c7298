"""Optimizers, the learning-rate schedule, and what a resumed run takes from a checkpoint."""
