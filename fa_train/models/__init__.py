"""A decoder model for packed streams of tokens, its LoRA adapters, and its Hugging Face checkpoints."""
