"""Predicts how much memory a training step needs, and finds settings with which the step fits in memory."""
