"""How much memory a training step takes, and which settings make it fit."""
