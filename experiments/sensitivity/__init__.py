"""Indicators against the truth."""
