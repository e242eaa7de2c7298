"""Writes checkpoints atomically, and checks them before they are read."""
