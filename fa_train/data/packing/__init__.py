"""Packs documents into rows that all have the same length."""
