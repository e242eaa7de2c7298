"""Packs documents into rows of equal length."""
