"""Training on several GPUs: sharding, sharded checkpoints, and decisions that all ranks share."""
