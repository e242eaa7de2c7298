"""Evaluates a trained model: generates text from a prompt."""
