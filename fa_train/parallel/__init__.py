"""Training on several GPUs: sharded weights, sharded checkpoints, and decisions that all ranks share."""
