"""Sources of documents and chats: files, Hugging Face datasets and random tokens."""
