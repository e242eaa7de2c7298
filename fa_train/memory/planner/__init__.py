"""Predicts how much memory a training step needs, and finds settings that fit."""
