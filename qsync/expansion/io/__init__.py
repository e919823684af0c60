"""Save and load expanded models."""
