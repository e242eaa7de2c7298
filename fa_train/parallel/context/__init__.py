"""Context parallelism: several ranks share one packed stream of tokens."""
