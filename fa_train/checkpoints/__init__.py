"""Checkpoints on disk: written whole or not at all, checked before they are read, and pruned."""
