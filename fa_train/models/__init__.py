"""Decoder models over packed streams of tokens, their adapters, and Hugging Face checkpoints."""
