"""Plan an expansion from a model and a recipe."""
