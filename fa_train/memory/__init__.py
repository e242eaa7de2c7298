"""What keeps long sequences within the GPU's memory."""
