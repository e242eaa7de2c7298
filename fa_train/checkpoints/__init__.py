"""Writes checkpoints under another name and renames them when they are complete. Checks checkpoints before use."""
