"""Documents and chats: files, Hugging Face datasets, synthetic tokens."""
