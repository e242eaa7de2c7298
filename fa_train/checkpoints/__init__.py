"""Writes each checkpoint under a temporary name and renames it when it is complete. Checks checkpoints before use."""
