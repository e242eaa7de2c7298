"""Documents as tokens, made once and kept on disk."""
