"""Tokens as rows of one length."""
