"""Casts: passes over a matrix between products, in plain torch and compiled."""
