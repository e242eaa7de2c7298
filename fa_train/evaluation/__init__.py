"""Evaluates a trained model by generating text from a prompt."""
