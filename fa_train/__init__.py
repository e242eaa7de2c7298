"""Trains GPTs on long sequences. Contains the model, the data pipeline, memory-saving methods and the training loop."""
