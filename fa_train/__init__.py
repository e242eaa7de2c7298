"""Trains GPTs at long sequence lengths: models, data, memory levers and the training loop."""
