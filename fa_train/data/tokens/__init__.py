"""Tokenises documents once and stores the tokens on disk."""
