"""Checkpoints of Hugging Face transformers, read and written."""
