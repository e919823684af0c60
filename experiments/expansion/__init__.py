"""What growing a model saves."""
