"""Recipes: which module reads and writes which space."""
