"""Lowering: the one place that decides where casts go. Pure; no torch."""
